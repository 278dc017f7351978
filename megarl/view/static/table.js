"use strict";
// The table of all rollouts, which sorts, filters and searches, beside the selected rollout: those of training in one
// view, those of evaluations in another.
{
  const COLUMNS = [
    ...["step", "number", "prompt", "status", "reward", "advantage", "logprob", "length", "actions", "turns"],
    ...["tool_calls", "tool_errors", "staleness", "source", "mode"],
  ];
  const HELD_OUT_COLUMNS = [
    ...["step", "number", "source", "mode", "prompt", "status", "reward", "logprob", "length", "turns"],
    ...["tool_calls", "tool_errors"],
  ];
  const HIT_COLUMNS = ["step", "number", "reward", "text"];
  const SEARCH_DELAY_MS = 400;
  const MAX_SEARCH_CHARS = 200;
  const TITLES = {
    number: "no.",
    tool_calls: "calls",
    tool_errors: "errors",
    logprob: "logp",
    advantage: "adv.",
    staleness: "stale",
  };
  const createState = (prefix) => ({
    prefix, // of the view's blocks
    condition: "",
    searchText: "",
    sortColumn: "step",
    isDescending: true,
    timer: 0,
    runIndex: -1, // of the drawn table
    selection: null, // [runIndex, step, number, prefix] of the selected rollout
  });
  const states = { Rollouts: createState(""), "Held-out": createState("eval-") };

  megarl.filterRollouts = (condition) => {
    states.Rollouts.condition = condition;
    states.Rollouts.searchText = "";
    states.Rollouts.runIndex = -1;
  };

  // Returns the values that a column is sorted by; for text, its ranks.
  function getSortKeys(state, table) {
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
  function selectRows(state, table, predicate) {
    const matches = new Uint32Array(table.size);
    let count = 0;
    for (let row = 0; row < table.size; row++) {
      if (!predicate || predicate(row)) matches[count++] = row;
    }
    const rows = matches.subarray(0, count);
    if (state.sortColumn === "step" && !state.isDescending) return rows; // the table is sorted by step
    const keys = getSortKeys(state, table);
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

  function createHeader(state, { name, isText }, update) {
    const sort = () => {
      state.isDescending = state.sortColumn === name ? !state.isDescending : !isText;
      state.sortColumn = name;
      update();
    };
    let arrow = "";
    if (state.sortColumn === name) arrow = state.isDescending ? "↓" : "↑";
    return el("span", { class: isText ? "text" : "", title: name, onclick: sort }, (TITLES[name] || name) + arrow);
  }

  // Returns the table, and a function that shows rows in it.
  function createTable(state, table, open, update) {
    const names = state.prefix ? HELD_OUT_COLUMNS : COLUMNS;
    const isVaried = {
      source: table.texts.source.some((text) => text),
      mode: table.columns.mode.some((mode) => mode !== table.columns.mode[0]),
    };
    const columns = names
      .filter((name) => isVaried[name] ?? true)
      .map((name) => ({ name, isText: Object.hasOwn(table.texts, name) }));
    const grid = megarl.createGrid({
      columns,
      getText: (row, name) => formatCell(table, row, name),
      onSelect: open,
      height: getGridHeight(),
    });
    const show = (rows) => {
      grid.head.replaceChildren(...columns.map((column) => createHeader(state, column, update)));
      grid.show(rows, rows.length);
      if (!state.selection && rows.length) {
        grid.select(rows[0]);
        open(rows[0]);
      }
    };
    return [grid.element, show];
  }

  const getGridHeight = () => Math.max(240, innerHeight - 190);

  // Returns a list of hits with a function that shows further ones. findRow(step, number): their row.
  function createHitList(table, findRow, open) {
    const hits = [];
    const grid = megarl.createGrid({
      columns: HIT_COLUMNS.map((name) => ({ name, isText: name === "text" })),
      getText: (i, name) => {
        if (name === "text") return megarl.createSnippet(hits[i]);
        return formatCell(table, findRow(hits[i].step, hits[i].number), name);
      },
      onSelect: (i) => open(findRow(hits[i].step, hits[i].number)),
      height: getGridHeight(),
    });
    grid.head.append(
      ...HIT_COLUMNS.map((name) => el("span", { class: name === "text" ? "text" : "" }, TITLES[name] || name)),
    );
    const add = (further) => {
      const isFirst = !hits.length && further.length;
      hits.push(...further);
      grid.show(null, hits.length, !isFirst);
      if (!isFirst) return;
      grid.select(0);
      open(findRow(hits[0].step, hits[0].number));
    };
    return [grid.element, add];
  }

  // Returns a function from step and number to the row of a table, which is sorted by both.
  function createRowFinder({ size, columns: { step, number } }) {
    return (wantedStep, wantedNumber) => {
      let low = 0;
      let high = size;
      while (low < high) {
        const middle = (low + high) >> 1;
        const isBefore = step[middle] < wantedStep || (step[middle] === wantedStep && number[middle] < wantedNumber);
        if (isBefore) low = middle + 1;
        else high = middle;
      }
      return low;
    };
  }

  // Searches the rows that satisfy the filter, page by page, into a list of hits. isOutdated(): whether to stop.
  function startSearch({ state, table, predicate, numRows, message, isOutdated, add }) {
    const text = state.searchText;
    const progress = { hits: 0, searched: 0, after: null, isDamaged: false };
    const describe = (isDone) => {
      const hits = `${formatCount(progress.hits)} ${progress.hits === 1 ? "rollout has" : "rollouts have"} “${text}”`;
      const isPartial = isDone && progress.searched < numRows;
      const reason = isPartial ? "; the page has no text of the others" : "";
      const damage = progress.isDamaged ? "; some files cannot be read, see the notes at the top" : "";
      return `${hits}; searched ${formatCount(progress.searched)} of ${formatCount(numRows)}${reason}${damage}`;
    };
    const loadPage = async () => {
      message.className = "muted matches";
      message.textContent = "Searching …";
      const { prefix, runIndex, condition } = state;
      try {
        const request = { prefix, runIndex, table, predicate, condition, text, after: progress.after };
        const page = await megarl.searchRollouts(request);
        if (isOutdated()) return;
        progress.hits += page.hits.length;
        progress.searched += page.searched;
        progress.after = page.next;
        progress.isDamaged ||= Boolean(page.notes?.length);
        add(page.hits);
        const more = page.next === null ? "" : el("button", { onclick: loadPage }, "more");
        message.replaceChildren(describe(page.next === null), " ", more);
      } catch (error) {
        if (isOutdated()) return;
        message.className = "error matches";
        message.textContent = error.message;
      }
    };
    return loadPage();
  }

  function formatMean(table, rows) {
    const rewards = Array.from(rows, (row) => table.columns.reward[row]).filter((reward) => !Number.isNaN(reward));
    if (!rewards.length) return "";
    return `, mean reward ${formatNumber(rewards.reduce((total, reward) => total + reward, 0) / rewards.length)}`;
  }

  // Returns selectors that set the filter to an evaluation set, a step and a way of sampling.
  function createSelectors(table, apply) {
    const selected = {};
    const createSelector = (name, values, label) => {
      const options = [label, ...values].map((text, i) => el("option", { value: i ? text : "" }, String(text)));
      const select = (event) => {
        selected[name] = event.target.value;
        const parts = Object.entries(selected).filter(([, value]) => value !== "");
        apply(parts.map(([column, value]) => `${column}=${column === "step" ? value : quote(value)}`).join(" and "));
      };
      const selector = el("select", { onchange: select, title: name }, ...options);
      selector.dataset.column = name;
      return selector;
    };
    const steps = [...new Set(table.columns.step)].reverse();
    return [
      createSelector("source", table.texts.source.filter(Boolean), "all sets"),
      createSelector("step", steps, "all steps"),
      createSelector("mode", table.texts.mode, "greedy and sampled"),
    ];
  }

  // Returns a value in quotes for a condition.
  const quote = (text) => (text.includes("'") ? `"${text}"` : `'${text}'`);

  function createToolbar(state, table, message, update) {
    const field = el("input", { type: "text", value: state.condition, placeholder: "reward<0.5 and turns>2" });
    const searchField = el("input", {
      type: "search",
      value: state.searchText,
      placeholder: "text in answers and tool results",
      maxLength: MAX_SEARCH_CHARS,
    });
    const updateAfter = (delay) => {
      clearTimeout(state.timer);
      state.timer = setTimeout(() => {
        state.condition = field.value;
        state.searchText = searchField.value;
        update();
      }, delay);
    };
    field.oninput = () => updateAfter(250);
    searchField.oninput = () => updateAfter(SEARCH_DELAY_MS);
    const apply = (condition) => {
      field.value = state.condition = condition;
      update();
    };
    const createPreset = (label, condition) => el("button", { onclick: () => apply(condition) }, label);
    const presets = [
      createPreset("last step", `step=${table.columns.step[table.size - 1]}`),
      createPreset("tool errors", "tool_errors>0"),
      createPreset("stale", "staleness>0"),
      createPreset("aborted", "status=aborted"),
      createPreset("all", ""),
    ];
    const controls = state.prefix ? createSelectors(table, apply) : presets;
    return el("div", { class: "toolbar" }, field, searchField, ...controls, message);
  }

  function drawTable(root, state, table, detail) {
    const message = el("span", { class: "muted matches" }); // the number of matching rollouts, or what is wrong
    const open = (row) => {
      state.selection = [state.runIndex, table.columns.step[row], table.columns.number[row], state.prefix];
      megarl.showRollout(detail, ...state.selection);
    };
    const [gridElement, show] = createTable(state, table, open, () => update());
    const list = el("div", { class: "hits" });
    const findRow = createRowFinder(table);
    let request = null; // the current search
    const update = () => {
      request = {};
      const thisRequest = request;
      let predicate;
      try {
        predicate = megarl.parseCondition(state.condition, table);
      } catch (error) {
        message.className = "error matches";
        message.textContent = error.message;
        return;
      }
      const rows = selectRows(state, table, predicate);
      const isSearching = state.searchText.trim() !== "";
      gridElement.hidden = isSearching;
      list.hidden = !isSearching;
      if (isSearching) {
        const [hitsElement, add] = createHitList(table, findRow, open);
        list.replaceChildren(hitsElement);
        const isOutdated = () => request !== thisRequest;
        startSearch({ state, table, predicate, numRows: rows.length, message, isOutdated, add });
        return;
      }
      message.className = "muted matches";
      const mean = state.prefix ? formatMean(table, rows) : "";
      message.textContent = `${formatCount(rows.length)} of ${formatCount(table.size)} rollouts${mean}`;
      show(rows);
    };
    const toolbar = createToolbar(state, table, message, update);
    root.replaceChildren(toolbar, el("div", { class: "split" }, el("div", {}, gridElement, list), detail));
    update();
  }

  const createView = (state, emptyHint) => ({
    async draw(root, { isStale = false } = {}) {
      const runIndex = megarl.runIndex;
      const isSameRun = state.runIndex === runIndex;
      if (isSameRun && root.firstChild && !isStale) return;
      if (!isSameRun) state.selection = null;
      state.runIndex = runIndex;
      const oldDetail = root.querySelector(".detail");
      root.replaceChildren(createHint("Loading the rollouts …"));
      const table = await megarl.loadTable(runIndex, state.prefix);
      if (!table.size) {
        root.replaceChildren(createHint(emptyHint));
        return;
      }
      const placeholder = createHint("Select a rollout to see its turns and tokens.");
      const isKept = oldDetail && state.selection;
      const detail = isKept ? oldDetail : el("section", { class: "card detail sticky" }, placeholder);
      drawTable(root, state, table, detail);
    },
  });

  megarl.views.Rollouts = createView(states.Rollouts, "No readable rollouts are recorded.");
  megarl.views["Held-out"] = createView(
    states["Held-out"],
    "No rollouts of evaluations are recorded: data.eval and run.eval_every ask for them, and track.save_rollouts keeps them.",
  );
}
