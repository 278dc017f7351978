"use strict";
// Prompts by reward, and one prompt over the steps.
{
  const state = { sort: "mean", down: false };

  function gather(table) {
    const size = table.texts.prompt.length, { prompt, reward, step, turns, tool_errors: errors } = table.columns;
    const found = { count: new Uint32Array(size), sum: new Float64Array(size), low: new Float64Array(size).fill(Infinity), high: new Float64Array(size).fill(-Infinity),
      first: new Int32Array(size).fill(2 ** 31 - 1), last: new Int32Array(size).fill(-1), steps: new Uint32Array(size), errors: new Float64Array(size), early: new Float64Array(size), late: new Float64Array(size), before: new Uint32Array(size), after: new Uint32Array(size) };
    for (let row = 0; row < table.size; row++) {
      const of = prompt[row];
      found.errors[of] += errors[row];
      if (reward[row] !== reward[row]) continue;
      if (step[row] !== found.last[of]) { found.steps[of]++; found.late[of] = 0; found.after[of] = 0; }
      found.count[of]++;
      found.sum[of] += reward[row];
      found.low[of] = Math.min(found.low[of], reward[row]);
      found.high[of] = Math.max(found.high[of], reward[row]);
      if (step[row] <= found.first[of]) { found.first[of] = step[row]; found.early[of] += reward[row]; found.before[of]++; }
      found.last[of] = step[row];
      found.late[of] += reward[row];
      found.after[of]++;
    }
    const rows = [];
    for (let of = 0; of < size; of++) if (found.count[of]) rows.push({ of, prompt: table.texts.prompt[of], samples: found.count[of], steps: found.steps[of], mean: found.sum[of] / found.count[of],
      first: found.early[of] / found.before[of], last: found.late[of] / found.after[of], change: found.late[of] / found.after[of] - found.early[of] / found.before[of], spread: found.high[of] - found.low[of], errors: found.errors[of] });
    return rows;
  }

  function one(root, table, row) {
    const { prompt, reward, step } = table.columns, by = new Map(), places = [];
    for (let i = 0; i < table.size; i++) if (prompt[i] === row.of) {
      places.push(i);
      if (reward[i] === reward[i]) by.set(step[i], [...(by.get(step[i]) || []), reward[i]]);
    }
    const steps = [...by.keys()].sort((a, b) => a - b), values = steps.map((at) => by.get(at));
    const chart = el("div"), detail = el("div");
    const open = (i) => megarl.showRollout(detail, megarl.run, step[i], table.columns.number[i]);
    const columns = ["step", "number", "reward", "length", "turns", "status"].map((name) => ({ name, text: name === "status" }));
    const grid = megarl.grid({ columns, cell: (i, name) => (table.texts[name] ? table.texts[name][table.columns[name][i]] : said(table.columns[name][i])), open, height: 170 });
    grid.head.append(...columns.map(({ name, text }) => el("span", { class: text ? "text" : "" }, name)));
    root.replaceChildren(el("h3", {}, `prompt ${row.prompt}`, el("button", { onclick: () => { megarl.where(`prompt='${row.prompt}'`); megarl.go("Rollouts"); } }, "in the table")), chart, grid.made, detail);
    grid.show(Uint32Array.from(places), places.length);
    const axis = { stroke: shade("--faint"), grid: { stroke: shade("--grid"), width: 1 }, ticks: { stroke: shade("--grid") }, font: "11px system-ui" };
    const dot = (label, f, colour, line) => [{ label, stroke: colour, width: line ? 1.8 : 0, points: { show: true, size: 5, stroke: colour }, value: (_, value) => said(value) }, values.map(f)];
    const lines = [dot("mean", (all) => all.reduce((a, b) => a + b, 0) / all.length, COLOURS[0], true), dot("best", (all) => Math.max(...all), COLOURS[2], false), dot("worst", (all) => Math.min(...all), COLOURS[3], false)];
    new uPlot({ width: Math.max(240, root.clientWidth - 24), height: 190, scales: { x: { time: false } }, axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 50 }], series: [{ label: "step" }, ...lines.map((line) => line[0])] }, [steps, ...lines.map((line) => line[1])], chart);
    if (places.length) open(places.at(-1));
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
      const again = () => {
        const sign = state.down ? -1 : 1, key = state.sort;
        all.sort((a, b) => (a[key] === b[key] ? a.of - b.of : sign * (a[key] < b[key] ? -1 : 1)));
        grid.head.replaceChildren(...names.map((name) => el("span", { class: name === "prompt" ? "text" : "", onclick: () => { state.down = state.sort === name ? !state.down : false; state.sort = name; again(); } }, name + (state.sort === name ? (state.down ? " ↓" : " ↑") : ""))));
        grid.choose(-1);
        grid.show(null, all.length);
      };
      const quick = (label, sort, down) => el("button", { onclick: () => { state.sort = sort; state.down = down; again(); } }, label);
      root.replaceChildren(el("div", { class: "bar" }, quick("worst", "mean", false), quick("best", "mean", true), quick("most learnt", "change", true), quick("most forgotten", "change", false), quick("all alike", "spread", false),
        el("span", { class: "faint" }, `${all.length.toLocaleString("en")} prompts; first, last: mean reward at the first and last step that had it`)), el("div", { class: "split" }, grid.made, detail));
      again();
      grid.choose(0);
      one(detail, table, all[0]);
    },
  };
}
