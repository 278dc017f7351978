"use strict";
// Prompts by reward, and one prompt over the steps.
{
  const state = { sort: "mean", down: false };

  function gather(table) {
    const size = table.texts.prompt.length, { prompt, reward, step, turns, tool_errors: errors } = table.columns;
    const stats = { count: new Uint32Array(size), sum: new Float64Array(size), low: new Float64Array(size).fill(Infinity), high: new Float64Array(size).fill(-Infinity),
      first: new Int32Array(size).fill(2 ** 31 - 1), last: new Int32Array(size).fill(-1), steps: new Uint32Array(size), errors: new Float64Array(size), early: new Float64Array(size), late: new Float64Array(size), before: new Uint32Array(size), after: new Uint32Array(size) };
    for (let row = 0; row < table.size; row++) {
      const id = prompt[row];
      stats.errors[id] += errors[row];
      if (reward[row] !== reward[row]) continue;
      if (step[row] !== stats.last[id]) { stats.steps[id]++; stats.late[id] = 0; stats.after[id] = 0; }
      stats.count[id]++;
      stats.sum[id] += reward[row];
      stats.low[id] = Math.min(stats.low[id], reward[row]);
      stats.high[id] = Math.max(stats.high[id], reward[row]);
      if (step[row] <= stats.first[id]) { stats.first[id] = step[row]; stats.early[id] += reward[row]; stats.before[id]++; }
      stats.last[id] = step[row];
      stats.late[id] += reward[row];
      stats.after[id]++;
    }
    const rows = [];
    for (let id = 0; id < size; id++) if (stats.count[id]) rows.push({ of: id, prompt: table.texts.prompt[id], samples: stats.count[id], steps: stats.steps[id], mean: stats.sum[id] / stats.count[id],
      first: stats.early[id] / stats.before[id], last: stats.late[id] / stats.after[id], change: stats.late[id] / stats.after[id] - stats.early[id] / stats.before[id], spread: stats.high[id] - stats.low[id], errors: stats.errors[id] });
    return rows;
  }

  function one(root, table, row) {
    const { prompt, reward, step } = table.columns, rewardsByStep = new Map(), rows = [];
    for (let i = 0; i < table.size; i++) if (prompt[i] === row.of) {
      rows.push(i);
      if (reward[i] === reward[i]) rewardsByStep.set(step[i], [...(rewardsByStep.get(step[i]) || []), reward[i]]);
    }
    const steps = [...rewardsByStep.keys()].sort((a, b) => a - b), values = steps.map((key) => rewardsByStep.get(key));
    const chart = el("div"), detail = el("div");
    const open = (i) => megarl.showRollout(detail, megarl.run, step[i], table.columns.number[i]);
    const columns = ["step", "number", "reward", "length", "turns", "status"].map((name) => ({ name, text: name === "status" }));
    const grid = megarl.grid({ columns, cell: (i, name) => (table.texts[name] ? table.texts[name][table.columns[name][i]] : said(table.columns[name][i])), open, height: 170 });
    grid.head.append(...columns.map(({ name, text }) => el("span", { class: text ? "text" : "" }, name)));
    root.replaceChildren(el("h3", {}, `prompt ${row.prompt}`, el("button", { onclick: () => { megarl.where(`prompt='${row.prompt}'`); megarl.go("Rollouts"); } }, "in the table")), chart, grid.made, detail);
    grid.show(Uint32Array.from(rows), rows.length);
    const axis = { stroke: shade("--faint"), grid: { stroke: shade("--grid"), width: 1 }, ticks: { stroke: shade("--grid") }, font: "11px system-ui" };
    const dot = (label, f, colour, line) => [{ label, stroke: colour, width: line ? 1.8 : 0, points: { show: true, size: 5, stroke: colour }, value: (_, value) => said(value) }, values.map(f)];
    const lines = [dot("mean", (all) => all.reduce((a, b) => a + b, 0) / all.length, COLOURS[0], true), dot("best", (all) => Math.max(...all), COLOURS[2], false), dot("worst", (all) => Math.min(...all), COLOURS[3], false)];
    new uPlot({ width: Math.max(240, root.clientWidth - 24), height: 190, scales: { x: { time: false } }, axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 50 }], series: [{ label: "step" }, ...lines.map((line) => line[0])] }, [steps, ...lines.map((line) => line[1])], chart);
    if (rows.length) open(rows.at(-1));
  }

  megarl.views.Prompts = {
    async draw(root) {
      root.replaceChildren(el("p", { class: "faint" }, "Reading the rollouts' figures …"));
      const table = await megarl.table(megarl.run), all = gather(table);
      if (!all.length) { root.replaceChildren(el("p", { class: "faint" }, "There are no rollouts with a reward on record.")); return; }
      const names = ["prompt", "samples", "steps", "mean", "first", "last", "change", "spread", "errors"];
      const columns = names.map((name) => ({ name, text: name === "prompt" }));
      const detail = el("section", { class: "card sticky" }, el("p", { class: "faint" }, "Choose a prompt to see it over the steps."));
      const grid = megarl.grid({ columns, cell: (i, name) => (name === "prompt" ? all[i].prompt : said(all[i][name], 3)), open: (i) => one(detail, table, all[i]), height: Math.max(240, innerHeight - 190) });
      const redraw = () => {
        const sign = state.down ? -1 : 1, key = state.sort;
        all.sort((a, b) => (a[key] === b[key] ? a.of - b.of : sign * (a[key] < b[key] ? -1 : 1)));
        grid.head.replaceChildren(...names.map((name) => el("span", { class: name === "prompt" ? "text" : "", onclick: () => { state.down = state.sort === name ? !state.down : false; state.sort = name; redraw(); } }, name + (state.sort === name ? (state.down ? " ↓" : " ↑") : ""))));
        grid.choose(-1);
        grid.show(null, all.length);
      };
      const quick = (label, sort, down) => el("button", { onclick: () => { state.sort = sort; state.down = down; redraw(); } }, label);
      root.replaceChildren(el("div", { class: "bar" }, quick("worst", "mean", false), quick("best", "mean", true), quick("most learnt", "change", true), quick("most forgotten", "change", false), quick("all alike", "spread", false),
        el("span", { class: "faint" }, `${all.length.toLocaleString("en")} prompts; first, last: mean reward at the first and last step that had it`)), el("div", { class: "split" }, grid.made, detail));
      redraw();
      grid.choose(0);
      one(detail, table, all[0]);
    },
  };
}
