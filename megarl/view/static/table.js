"use strict";
// A virtual table of any length: only visible rows are in the document.
megarl.grid = ({ columns, size, cell, open, height }) => {
  const ROW = 24, MOST = 8e6; // pixels of height that every browser can scroll
  const state = { order: null, count: 0, on: -1, first: -1 };
  const share = ({ name, text }) => (name === "prompt" ? 100 : text || name === "step" || name.length > 5 ? 60 : 48);
  const widths = columns.map((column) => `minmax(0, ${share(column)}fr)`).join(" ");
  const rows = el("div", { class: "rows" });
  const room = el("div");
  const scroll = el("div", { class: "scroll", tabIndex: 0 }, room);
  room.append(rows);
  const head = el("div", { class: "row head" });
  head.style.gridTemplateColumns = widths;
  const made = el("div", { class: "grid" }, head, scroll);
  scroll.style.height = height + "px";
  const seen = Math.ceil(height / ROW);

  function draw() {
    const fullHeight = state.count * ROW, shown = Math.min(fullHeight, MOST);
    room.style.height = Math.max(shown, 1) + "px";
    const scrollRange = Math.max(1, shown - height);
    const first = Math.max(0, Math.min(Math.round((scroll.scrollTop / scrollRange) * (state.count - seen)), state.count - seen));
    const lines = [];
    for (let i = first; i < Math.min(state.count, first + seen); i++) {
      const row = state.order ? state.order[i] : i;
      const line = el("div", { class: row === state.on ? "row on" : "row" }, ...columns.map((column) => {
        const text = cell(row, column.name);
        return el("span", { class: column.text ? "text" : "", title: column.text ? text : "" }, text);
      }));
      line.style.gridTemplateColumns = widths;
      line.onclick = () => { state.on = row; draw(); open(row); };
      lines.push(line);
    }
    rows.style.height = Math.min(height, Math.max(1, fullHeight)) + "px";
    rows.replaceChildren(...lines);
  }
  scroll.onscroll = () => { if (!state.frame) state.frame = requestAnimationFrame(() => { state.frame = 0; draw(); }); };
  scroll.onkeydown = (event) => {
    const delta = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!delta || !state.count) return;
    event.preventDefault();
    const order = state.order, position = order ? order.indexOf(state.on) : state.on;
    const next = Math.max(0, Math.min(state.count - 1, position + delta));
    state.on = order ? order[next] : next;
    draw();
    open(state.on);
  };
  return { made, head, draw, show(order, count) { state.order = order; state.count = count; scroll.scrollTop = 0; draw(); }, choose(row) { state.on = row; draw(); } };
};

{
  const COLUMNS = ["step", "number", "prompt", "status", "reward", "advantage", "logprob", "length", "actions", "turns", "tool_calls", "tool_errors", "staleness", "source"];
  const TITLES = { number: "no.", tool_calls: "calls", tool_errors: "errors", actions: "own", logprob: "logp", advantage: "adv.", staleness: "stale" };
  const state = { where: "", sort: "step", down: true, run: -1 };
  megarl.where = (text) => { state.where = text; state.run = -1; };

  // Returns the matching rows, sorted; NaN comes last in either direction.
  function chosen(table, fits) {
    const order = new Uint32Array(table.size);
    let count = 0;
    for (let row = 0; row < table.size; row++) if (!fits || fits(row)) order[count++] = row;
    const rows = order.subarray(0, count);
    let values = table.columns[state.sort];
    if (table.texts[state.sort]) {
      const texts = table.texts[state.sort], sorted = texts.map((_, i) => i).sort((a, b) => (texts[a] < texts[b] ? -1 : 1));
      const rank = new Uint32Array(texts.length);
      sorted.forEach((id, i) => { rank[id] = i; });
      values = values.map((id) => rank[id]);
    }
    if (state.sort === "step" && !state.down) return [rows, count];
    const sign = state.down ? -1 : 1;
    rows.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === y) return a - b;
      if (x !== x) return y !== y ? a - b : 1;
      if (y !== y) return -1;
      return sign * (x - y);
    });
    return [rows, count];
  }

  megarl.views.Rollouts = {
    async draw(root) {
      const run = megarl.run;
      if (state.run === run && root.firstChild && !megarl.changed) return;
      if (state.run !== run) megarl.opened = null;
      state.run = run;
      const before = root.querySelector(".detail");
      root.replaceChildren(el("p", { class: "faint" }, "Reading the rollouts' figures …"));
      const table = await megarl.table(run);
      if (!table.size) { root.replaceChildren(el("p", { class: "faint" }, "There are no rollouts on record that can be read.")); return; }
      const names = table.texts.source.some((text) => text) ? COLUMNS : COLUMNS.filter((name) => name !== "source");
      const detail = before && megarl.opened ? before : el("section", { class: "card detail sticky" }, el("p", { class: "faint" }, "Choose a rollout to see its turns and tokens."));
      const open = (row) => {
        megarl.opened = [run, table.columns.step[row], table.columns.number[row]];
        megarl.showRollout(detail, ...megarl.opened);
      };
      const cell = (row, name) => {
        const value = table.columns[name][row];
        return table.texts[name] ? table.texts[name][value] : said(Math.abs(value) < 100 ? +value.toFixed(3) : value);
      };
      const columns = names.map((name) => ({ name, text: Object.hasOwn(table.texts, name) }));
      const grid = megarl.grid({ columns, size: table.size, cell, open, height: Math.max(240, innerHeight - 190) });
      const count = el("span", { class: "faint" });
      const update = () => {
        let fits = null;
        try {
          fits = megarl.condition(state.where, table);
          count.className = "faint";
        } catch (error) {
          count.className = "out";
          count.textContent = error.message;
          return;
        }
        const [order, numRows] = chosen(table, fits);
        count.textContent = `${numRows.toLocaleString("en")} of ${table.size.toLocaleString("en")} rollouts`;
        grid.head.replaceChildren(...columns.map(({ name, text }) => el("span", { class: text ? "text" : "", title: name,
          onclick: () => { state.down = state.sort === name ? !state.down : !text; state.sort = name; update(); } },
        (TITLES[name] || name) + (state.sort === name ? (state.down ? "↓" : "↑") : ""))));
        grid.show(order, numRows);
        if (!megarl.opened && numRows) { grid.choose(order[0]); open(order[0]); }
      };
      const field = el("input", { type: "text", value: state.where, placeholder: "reward<0.5 and turns>2",
        oninput: () => { clearTimeout(state.timer); state.timer = setTimeout(() => { state.where = field.value; update(); }, 250); } });
      const quick = (text, label) => el("button", { onclick: () => { field.value = state.where = text; update(); } }, label);
      const newest = table.columns.step[table.size - 1];
      root.replaceChildren(el("div", { class: "bar" }, field, quick(`step=${newest}`, "last step"), quick("tool_errors>0", "tool errors"), quick("staleness>0", "stale"),
        quick("status=aborted", "aborted"), quick("", "all"), count), el("div", { class: "split" }, grid.made, detail));
      update();
    },
  };
}
