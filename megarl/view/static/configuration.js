"use strict";
// The configuration: of one run beside the defaults, or of several beside each other.
{
  const state = { isDifferent: true, filter: "" };

  // Returns the text of a key in a run; "" if the run has no such key.
  const getValue = (run, key) => run.config[key] ?? "";

  function listKeys(runs) {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
    const isShown = (key) => {
      if (state.filter && !`${key}: ${runs.map((run) => getValue(run, key)).join(" ")}`.includes(state.filter)) return false;
      if (!state.isDifferent) return true;
      if (runs.length > 1) return runs.some((run) => getValue(run, key) !== getValue(runs[0], key));
      return runs[0].changed_keys.includes(key);
    };
    return keys.filter(isShown);
  }

  function createTable(runs, keys) {
    const areAllChanged = runs.length === 1 && state.isDifferent; // then all are
    const createCells = (tag, texts) => texts.map((text) => el(tag, {}, text));
    const head = el("tr", {}, ...createCells("th", ["key", ...(runs.length > 1 ? runs.map(({ name }) => name) : ["value"])]));
    const rows = keys.map((key) => {
      const isChanged = !areAllChanged && runs.some((run) => run.changed_keys.includes(key));
      const cells = createCells("td", [key, ...runs.map((run) => getValue(run, key))]);
      return el("tr", { class: isChanged ? "changed" : "" }, ...cells);
    });
    return el("table", { class: "keys" }, el("thead", {}, head), el("tbody", {}, ...rows));
  }

  megarl.views.Configuration = {
    draw(root) {
      const { runs } = megarl.overview;
      const content = el("div");
      const redraw = () => {
        const keys = listKeys(runs);
        const hint = runs.length > 1 ? "All keys of these runs are equal." : "All keys have their defaults.";
        content.replaceChildren(keys.length ? createTable(runs, keys) : createHint(state.filter ? "No key matches." : hint));
      };
      const change = (event) => {
        state.isDifferent = event.target.checked;
        redraw();
      };
      const filter = (event) => {
        state.filter = event.target.value.trim();
        redraw();
      };
      const label = runs.length > 1 ? " only keys that differ between the runs" : " only keys that are not at their default";
      const toolbar = el(
        "div",
        { class: "toolbar" },
        el("input", { type: "search", placeholder: "filter by key or value", value: state.filter, oninput: filter }),
        el("label", {}, el("input", { type: "checkbox", checked: state.isDifferent, onchange: change }), label),
        el("span", { class: "muted" }, "bold: not at its default"),
      );
      root.replaceChildren(toolbar, content);
      redraw();
    },
  };
}
