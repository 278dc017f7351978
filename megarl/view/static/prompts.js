"use strict";
// Prompts by reward, and the rewards of one prompt by step.
{
  const COLUMNS = ["text", "prompt", "samples", "steps", "mean", "first", "last", "change", "spread", "errors"];
  const ROLLOUT_COLUMNS = ["step", "number", "reward", "length", "turns", "status"];
  const TEXT_COLUMNS = ["text", "prompt"];
  const state = { sortColumn: "mean", isDescending: false, words: "", timer: 0 };

  const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

  // Adds a reward to a prompt's summary. Rewards arrive in order of steps.
  function addReward(summary, step, reward) {
    if (step !== summary.lastStep) {
      summary.steps++;
      summary.lastStep = step;
      summary.lastSum = 0;
      summary.lastSamples = 0;
    }
    if (summary.steps === 1) {
      summary.firstSum += reward;
      summary.firstSamples++;
    }
    summary.lastSum += reward;
    summary.lastSamples++;
    summary.sum += reward;
    summary.samples++;
    summary.lowest = Math.min(summary.lowest, reward);
    summary.highest = Math.max(summary.highest, reward);
  }

  // Returns {id, prompt, text, samples, steps, mean, first, last, change, spread, errors} of each prompt with a reward, where
  // first and last are mean rewards at the first and last step that sampled it, and text is the beginning of its last user
  // message. texts: by id, empty where it cannot be read.
  function summarizePrompts(table, texts) {
    const { prompt, reward, step, tool_errors: toolErrors } = table.columns;
    const summaries = table.texts.prompt.map((name, id) => ({
      ...{ id, prompt: name, samples: 0, steps: 0, errors: 0, sum: 0, lowest: Infinity, highest: -Infinity },
      ...{ firstSum: 0, firstSamples: 0, lastSum: 0, lastSamples: 0, lastStep: -1 },
    }));
    for (let row = 0; row < table.size; row++) {
      const summary = summaries[prompt[row]];
      summary.errors += toolErrors[row];
      if (!Number.isNaN(reward[row])) addReward(summary, step[row], reward[row]);
    }
    return summaries
      .filter((summary) => summary.samples)
      .map((summary) => {
        const first = summary.firstSum / summary.firstSamples;
        const last = summary.lastSum / summary.lastSamples;
        return {
          id: summary.id,
          prompt: summary.prompt,
          text: texts[summary.id] || "",
          samples: summary.samples,
          steps: summary.steps,
          mean: summary.sum / summary.samples,
          first,
          last,
          change: last - first,
          spread: summary.highest - summary.lowest,
          errors: summary.errors,
        };
      });
  }

  function findRows(table, promptId) {
    const rows = [];
    table.columns.prompt.forEach((id, row) => {
      if (id === promptId) rows.push(row);
    });
    return rows;
  }

  // Draws the mean, highest and lowest reward by step.
  function drawRewards(root, width, table, rows) {
    const { reward, step } = table.columns;
    const rewardsByStep = new Map();
    for (const row of rows) {
      if (Number.isNaN(reward[row])) continue;
      if (!rewardsByStep.has(step[row])) rewardsByStep.set(step[row], []);
      rewardsByStep.get(step[row]).push(reward[row]);
    }
    const steps = [...rewardsByStep.keys()].sort((a, b) => a - b);
    const rewards = steps.map((key) => rewardsByStep.get(key));
    const createSeries = (label, color, lineWidth) => ({
      label,
      stroke: color,
      width: lineWidth,
      points: { show: true, size: 5, stroke: color },
      value: (_, value) => formatNumber(value),
    });
    const series = [
      createSeries("mean", getColor(0), 1.8),
      createSeries("best", getColor(2), 0),
      createSeries("worst", getColor(3), 0),
    ];
    const data = [mean, (values) => Math.max(...values), (values) => Math.min(...values)].map((f) => rewards.map(f));
    const options = {
      width,
      height: 190,
      scales: { x: { time: false } },
      axes: createAxes({ size: 50 }),
      series: [{ label: "step" }, ...series],
    };
    new uPlot(options, [steps, ...data], root);
  }

  // Draws one prompt: its rewards by step, and all its rollouts.
  function drawPrompt(root, table, { id, prompt, text }) {
    const { columns, texts } = table;
    const rows = findRows(table, id);
    const chart = el("div");
    const detail = el("div");
    const open = (row) => megarl.showRollout(detail, megarl.runIndex, columns.step[row], columns.number[row]);
    const grid = megarl.createGrid({
      columns: ROLLOUT_COLUMNS.map((name) => ({ name, isText: name === "status" })),
      getText: (row, name) => {
        const value = columns[name][row];
        return texts[name] ? texts[name][value] : formatNumber(value);
      },
      onSelect: open,
      height: 170,
    });
    grid.head.append(...ROLLOUT_COLUMNS.map((name) => el("span", { class: name === "status" ? "text" : "" }, name)));
    const showInTable = () => {
      megarl.filterRollouts(`prompt='${prompt}'`);
      megarl.showView("Rollouts");
    };
    const title = el("h3", {}, `prompt ${prompt}`, el("button", { onclick: showInTable }, "show in Rollouts"));
    root.replaceChildren(title, createHint(text), chart, grid.element, detail);
    grid.show(Uint32Array.from(rows), rows.length);
    drawRewards(chart, Math.max(240, root.clientWidth - 24), table, rows);
    if (rows.length) open(rows.at(-1));
  }

  function sortPrompts(prompts) {
    const name = state.sortColumn;
    const sign = state.isDescending ? -1 : 1;
    prompts.sort((a, b) => {
      if (a[name] === b[name]) return a.id - b.id;
      return a[name] < b[name] ? -sign : sign;
    });
  }

  function createHeader(name, redraw) {
    const sort = () => {
      state.isDescending = state.sortColumn === name && !state.isDescending;
      state.sortColumn = name;
      redraw();
    };
    let arrow = "";
    if (state.sortColumn === name) arrow = state.isDescending ? " ↓" : " ↑";
    return el("span", { class: TEXT_COLUMNS.includes(name) ? "text" : "", onclick: sort }, name + arrow);
  }

  // Returns the prompts that have all words in their text or id, in any case.
  function filterPrompts(prompts) {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    return prompts.filter(({ text, prompt }) => {
      const whole = `${text} ${prompt}`.toLowerCase();
      return words.every((word) => whole.includes(word));
    });
  }

  function createToolbar(count, redraw) {
    const search = (event) => {
      clearTimeout(state.timer);
      state.words = event.target.value;
      state.timer = setTimeout(redraw, 200);
    };
    const createPreset = (label, name, isDescending) => {
      const sort = () => {
        state.sortColumn = name;
        state.isDescending = isDescending;
        redraw();
      };
      return el("button", { onclick: sort }, label);
    };
    const explanation = "first, last: mean reward at the first and last step that sampled the prompt";
    return el(
      "div",
      { class: "toolbar" },
      el("input", { type: "search", value: state.words, placeholder: "prompts with these words", oninput: search }),
      createPreset("worst", "mean", false),
      createPreset("best", "mean", true),
      createPreset("most improved", "change", true),
      createPreset("most regressed", "change", false),
      createPreset("least spread", "spread", false),
      count,
      el("span", { class: "muted" }, explanation),
    );
  }

  megarl.views.Prompts = {
    async draw(root) {
      root.replaceChildren(createHint("Loading the rollouts …"));
      const table = await megarl.loadTable(megarl.runIndex);
      // A page may be without the file of texts; the table then has ids only.
      const texts = table.size ? await megarl.loadBlock("prompts-" + megarl.runIndex).catch(() => []) : [];
      const prompts = summarizePrompts(table, texts);
      if (!prompts.length) {
        root.replaceChildren(createHint("No rollouts with a reward are recorded."));
        return;
      }
      const hasTexts = prompts.some(({ text }) => text);
      const names = COLUMNS.filter((name) => name !== "text" || hasTexts);
      const detail = el("section", { class: "card sticky" });
      const count = el("span", { class: "muted matches" });
      let shown = prompts;
      const grid = megarl.createGrid({
        columns: names.map((name) => ({ name, isText: TEXT_COLUMNS.includes(name) })),
        getText: (i, name) => (TEXT_COLUMNS.includes(name) ? shown[i][name] : formatNumber(shown[i][name], 3)),
        onSelect: (i) => drawPrompt(detail, table, shown[i]),
        height: Math.max(240, innerHeight - 190),
      });
      const redraw = () => {
        shown = filterPrompts(prompts);
        sortPrompts(shown);
        count.textContent = `${formatCount(shown.length)} of ${formatCount(prompts.length)} prompts`;
        grid.head.replaceChildren(...names.map((name) => createHeader(name, redraw)));
        grid.show(null, shown.length);
        grid.select(-1);
      };
      root.replaceChildren(createToolbar(count, redraw), el("div", { class: "split" }, grid.element, detail));
      redraw();
      if (!shown.length) return;
      grid.select(0);
      drawPrompt(detail, table, shown[0]);
    },
  };
}
