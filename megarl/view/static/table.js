"use strict";
// The table of all rollouts, which sorts and filters, beside the selected rollout.
{
  const COLUMNS = [
    ...["step", "number", "prompt", "status", "reward", "advantage", "logprob", "length", "actions", "turns"],
    ...["tool_calls", "tool_errors", "staleness", "source"],
  ];
  const TITLES = {
    number: "no.",
    tool_calls: "calls",
    tool_errors: "errors",
    logprob: "logp",
    advantage: "adv.",
    staleness: "stale",
  };
  const state = {
    condition: "",
    sortColumn: "step",
    isDescending: true,
    filterTimer: 0,
    runIndex: -1, // of the drawn table
    selection: null, // [runIndex, step, number] of the selected rollout
  };

  megarl.filterRollouts = (condition) => {
    state.condition = condition;
    state.runIndex = -1;
  };

  // Returns the values that a column is sorted by; for text, its ranks.
  function getSortKeys(table) {
    const column = table.columns[state.sortColumn];
    const texts = table.texts[state.sortColumn];
    if (!texts) return column;
    const sortedIds = texts.map((_, id) => id).sort((a, b) => (texts[a] < texts[b] ? -1 : 1));
    const ranks = new Uint32Array(texts.length);
    sortedIds.forEach((id, rank) => {
      ranks[id] = rank;
    });
    return column.map((id) => ranks[id]);
  }

  // Returns the rows that satisfy `predicate`, sorted; NaN comes last in either direction.
  function selectRows(table, predicate) {
    const matches = new Uint32Array(table.size);
    let count = 0;
    for (let row = 0; row < table.size; row++) {
      if (!predicate || predicate(row)) matches[count++] = row;
    }
    const rows = matches.subarray(0, count);
    if (state.sortColumn === "step" && !state.isDescending) return rows; // the table is sorted by step
    const keys = getSortKeys(table);
    const sign = state.isDescending ? -1 : 1;
    return rows.sort((a, b) => {
      const x = keys[a];
      const y = keys[b];
      if (x === y) return a - b;
      if (Number.isNaN(x)) return Number.isNaN(y) ? a - b : 1;
      if (Number.isNaN(y)) return -1;
      return sign * (x - y);
    });
  }

  function formatCell(table, row, name) {
    const value = table.columns[name][row];
    if (table.texts[name]) return table.texts[name][value];
    return formatNumber(Math.abs(value) < 100 ? +value.toFixed(3) : value);
  }

  function createHeader({ name, isText }, update) {
    const sort = () => {
      state.isDescending = state.sortColumn === name ? !state.isDescending : !isText;
      state.sortColumn = name;
      update();
    };
    let arrow = "";
    if (state.sortColumn === name) arrow = state.isDescending ? "↓" : "↑";
    return el("span", { class: isText ? "text" : "", title: name, onclick: sort }, (TITLES[name] || name) + arrow);
  }

  // Returns the grid, a message about the filter, and a function that applies the filter and order.
  function createTable(table, runIndex, detail) {
    const hasSources = table.texts.source.some((text) => text);
    const columns = COLUMNS.filter((name) => name !== "source" || hasSources).map((name) => ({
      name,
      isText: Object.hasOwn(table.texts, name),
    }));
    const open = (row) => {
      state.selection = [runIndex, table.columns.step[row], table.columns.number[row]];
      megarl.showRollout(detail, ...state.selection);
    };
    const grid = megarl.createGrid({
      columns,
      getText: (row, name) => formatCell(table, row, name),
      onSelect: open,
      height: Math.max(240, innerHeight - 190),
    });
    const message = el("span", { class: "muted" }); // the number of matching rollouts, or what is wrong
    const update = () => {
      let predicate;
      try {
        predicate = megarl.parseCondition(state.condition, table);
      } catch (error) {
        message.className = "error";
        message.textContent = error.message;
        return;
      }
      const rows = selectRows(table, predicate);
      message.className = "muted";
      message.textContent = `${formatCount(rows.length)} of ${formatCount(table.size)} rollouts`;
      grid.head.replaceChildren(...columns.map((column) => createHeader(column, update)));
      grid.show(rows, rows.length);
      if (!state.selection && rows.length) {
        grid.select(rows[0]);
        open(rows[0]);
      }
    };
    return [grid.element, message, update];
  }

  function createToolbar(table, message, update) {
    const field = el("input", { type: "text", value: state.condition, placeholder: "reward<0.5 and turns>2" });
    field.oninput = () => {
      clearTimeout(state.filterTimer);
      state.filterTimer = setTimeout(() => {
        state.condition = field.value;
        update();
      }, 250);
    };
    const createPreset = (label, condition) => {
      const apply = () => {
        field.value = state.condition = condition;
        update();
      };
      return el("button", { onclick: apply }, label);
    };
    return el(
      "div",
      { class: "toolbar" },
      field,
      createPreset("last step", `step=${table.columns.step[table.size - 1]}`),
      createPreset("tool errors", "tool_errors>0"),
      createPreset("stale", "staleness>0"),
      createPreset("aborted", "status=aborted"),
      createPreset("all", ""),
      message,
    );
  }

  megarl.views.Rollouts = {
    async draw(root, { isStale = false } = {}) {
      const runIndex = megarl.runIndex;
      const isSameRun = state.runIndex === runIndex;
      if (isSameRun && root.firstChild && !isStale) return;
      if (!isSameRun) state.selection = null;
      state.runIndex = runIndex;
      const oldDetail = root.querySelector(".detail");
      root.replaceChildren(createHint("Loading the rollouts …"));
      const table = await megarl.loadTable(runIndex);
      if (!table.size) {
        root.replaceChildren(createHint("No readable rollouts are recorded."));
        return;
      }
      const placeholder = createHint("Select a rollout to see its turns and tokens.");
      const isKept = oldDetail && state.selection;
      const detail = isKept ? oldDetail : el("section", { class: "card detail sticky" }, placeholder);
      const [gridElement, message, update] = createTable(table, runIndex, detail);
      const toolbar = createToolbar(table, message, update);
      root.replaceChildren(toolbar, el("div", { class: "split" }, gridElement, detail));
      update();
    },
  };
}
