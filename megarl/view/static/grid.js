"use strict";
// A virtual table of any length: only visible rows are in the document.
{
  const ROW_HEIGHT = 24;
  const MAX_SCROLL_HEIGHT = 8e6; // pixels that every browser can scroll

  // Returns the relative width of a column.
  function getWeight({ name, isText }) {
    if (name === "text") return 400;
    if (name === "prompt") return 100;
    return isText || name === "step" || name.length > 5 ? 60 : 48;
  }

  // columns: [{name, isText}]. getText(row, name): text of a cell, or an element with it. onSelect(row): called when the user selects a row.
  // height: in pixels, without the header.
  megarl.createGrid = ({ columns, getText, onSelect, height }) => {
    const state = { order: null, count: 0, selected: -1, frame: 0 };
    const numVisible = Math.ceil(height / ROW_HEIGHT);
    const template = columns.map((column) => `minmax(0, ${getWeight(column)}fr)`).join(" ");
    const head = el("div", { class: "row head" });
    const rows = el("div", { class: "rows" });
    const spacer = el("div", {}, rows); // sets the range of the scroll bar
    const scroller = el("div", { class: "scroller", tabIndex: 0 }, spacer);
    head.style.gridTemplateColumns = template;
    scroller.style.height = height + "px";

    const getRow = (position) => (state.order ? state.order[position] : position);

    function createRow(row) {
      const cells = columns.map(({ name, isText }) => {
        const content = getText(row, name);
        const title = isText ? (content.textContent ?? content) : "";
        return el("span", { class: isText ? "text" : "", title }, content);
      });
      const element = el("div", { class: row === state.selected ? "row selected" : "row" }, ...cells);
      element.style.gridTemplateColumns = template;
      element.onclick = () => {
        select(row);
        onSelect(row);
      };
      return element;
    }

    function draw() {
      const fullHeight = state.count * ROW_HEIGHT;
      const scrollHeight = Math.min(fullHeight, MAX_SCROLL_HEIGHT);
      spacer.style.height = Math.max(scrollHeight, 1) + "px";
      const lastFirst = state.count - numVisible;
      const fraction = scroller.scrollTop / Math.max(1, scrollHeight - height);
      const first = Math.max(0, Math.min(Math.round(fraction * lastFirst), lastFirst));
      const elements = [];
      for (let i = first; i < Math.min(state.count, first + numVisible); i++) elements.push(createRow(getRow(i)));
      rows.style.height = Math.min(height, Math.max(1, fullHeight)) + "px";
      rows.replaceChildren(...elements);
    }

    function select(row) {
      state.selected = row;
      draw();
    }

    // Shows `count` rows. order: their indices, or null for all in their own order. isMore: whether to stay at the
    // place, because rows have been added.
    function show(order, count, isMore = false) {
      state.order = order;
      state.count = count;
      if (!isMore) scroller.scrollTop = 0;
      draw();
    }

    scroller.onscroll = () => {
      if (state.frame) return;
      state.frame = requestAnimationFrame(() => {
        state.frame = 0;
        draw();
      });
    };
    scroller.onkeydown = (event) => {
      const delta = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!delta || !state.count) return;
      event.preventDefault();
      const position = state.order ? state.order.indexOf(state.selected) : state.selected;
      const row = getRow(Math.max(0, Math.min(state.count - 1, position + delta)));
      select(row);
      onSelect(row);
    };
    return { element: el("div", { class: "grid" }, head, scroller), head, show, select };
  };
}
