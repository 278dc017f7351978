"use strict";
// Charts of metrics by step, all runs in each, with bands, smoothed lines over raw ones, and alarms.
{
  const FIRST = ["rollout/reward_mean", "eval/reward_greedy", "eval/reward_sampled", "rollout/response_length_mean", "actor/entropy",
    "actor/grad_norm", "actor/ppo_kl", "actor/kl_to_reference", "rollout/reward_variance", "actor/advantage_variance", "actor/pg_loss",
    "critic/vf_loss", "rollout/zero_spread_frac", "rollout/truncated_frac", "rollout/tool_errors", "time/step", "perf/tokens_per_second_per_rank"];
  const state = { smooth: 0.6, filter: "", charts: [], shown: 12, opened: new Map() };

  // Debiased exponential moving average: `weight` is the decay of past values.
  function smoothed(values, weight) {
    let mean = 0, share = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return mean / share;
    });
  }

  async function series(run, name) {
    const packed = megarl.overview.runs[run].metrics[name];
    if (!packed) return null;
    if (!state.opened.has(packed)) state.opened.set(packed, megarl.column(packed));
    return state.opened.get(packed);
  }

  function names() {
    const all = [...new Set(megarl.overview.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    if (state.filter) return all.filter((name) => name.includes(state.filter));
    return [...FIRST.filter((name) => all.includes(name)), ...all.filter((name) => !FIRST.includes(name))];
  }

  function outside(band, value) {
    return (band.least !== null && value < band.least * (1 - 1e-3 * Math.sign(band.least))) ||
      (band.most !== null && value > band.most * (1 + 1e-3 * Math.sign(band.most)));
  }

  // Gives constant metrics a y range, too: uPlot's own is empty below double precision.
  function span(name, low, high) {
    if (low === null || high === null) return [0, 1];
    const minSpan = Math.max(1e-4 * Math.max(Math.abs(low), Math.abs(high)), 1e-12);
    if (high - low >= minSpan) { const margin = 0.08 * (high - low); return [low - margin, high + margin]; }
    if (low === 0 && name.endsWith("_frac")) return [0, 1];
    if (low === high) return low === 0 ? [-1, 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)]; // few digits on the axis
    return [low - minSpan, high + minSpan];
  }

  async function chart(name, card) {
    const runs = megarl.overview.runs;
    const columns = await Promise.all(runs.map((_, run) => series(run, name)));
    const steps = [...new Set(runs.flatMap((run, i) => (columns[i] ? run.steps : [])))].sort((a, b) => a - b);
    const index = new Map(steps.map((step, i) => [step, i]));
    const data = [steps], lines = [{ label: "step" }];
    const band = runs.map((run) => run.bands[name]).find((candidate) => candidate);
    const watched = runs.some((run) => run.watched && run.bands[name]);
    let numOutside = 0;
    const newestValues = [];
    runs.forEach((run, number) => {
      if (!columns[number]) return;
      const values = new Array(steps.length).fill(null);
      run.steps.forEach((step, i) => { if (!Number.isNaN(columns[number][i])) values[index.get(step)] = columns[number][i]; });
      const present = values.filter((value) => value !== null);
      if (present.length) newestValues.push([run.name, present.at(-1)]);
      if (band) numOutside += present.filter((value) => outside(band, value)).length;
      const isShort = present.length < 40, colour = COLOURS[number % COLOURS.length];
      data.push(values);
      const hasRaw = state.smooth > 0 && !isShort;
      lines.push({ label: runs.length > 1 ? run.name : "value", stroke: hasRaw ? colour + "55" : colour, width: hasRaw ? 1 : 1.6, spanGaps: true, points: { show: isShort, size: 4 },
        value: (_, value) => said(value) });
      if (hasRaw) {
        data.push(smoothed(values, state.smooth));
        lines.push({ label: "smooth", stroke: colour, width: 1.8, spanGaps: true, points: { show: false }, value: (_, value) => said(value) });
      }
    });
    // A band that no guard watches is a default, which may not fit this run, so values outside are not counted.
    const ends = !band ? "" : band.least === null ? "≤ " + band.most : band.most === null ? "≥ " + band.least : band.least + " to " + band.most;
    const newest = `last ${newestValues.map(([, value]) => said(value)).join(" and ")}`;
    const title = el("h3", {}, name, el("span", { class: numOutside && watched ? "out" : "" },
      !band ? newest : watched ? `${numOutside ? numOutside + " outside " : "within "}${ends}` : `${newest}, often ${ends}`));
    title.title = [...(newestValues.length > 1 ? newestValues.map(([run, value]) => `${run}: last ${said(value)}`) : []),
      band && band.low && "below: " + band.low, band && band.high && "above: " + band.high].filter(Boolean).join("\n");
    card.replaceChildren(title);
    const alarms = runs.flatMap((run) => run.alarms.filter((alarm) => alarm[2].includes(name)).map((alarm) => alarm[0]));
    const axis = { stroke: shade("--faint"), grid: { stroke: shade("--grid"), width: 1 }, ticks: { stroke: shade("--grid") }, font: "11px system-ui" };
    const plot = new uPlot({
      width: Math.max(200, card.clientWidth - 22), height: 190, cursor: { sync: { key: "steps" }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => span(name, low, high) } }, legend: { live: true },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => said(tick, 5)) }],
      series: lines,
      hooks: { drawClear: [(u) => {
        const { ctx, bbox } = u;
        if (band) {
          const toPixel = (end, open) => (end === null ? open : Math.min(bbox.top + bbox.height, Math.max(bbox.top, u.valToPos(end, "y", true))));
          const high = toPixel(band.most, bbox.top), low = toPixel(band.least, bbox.top + bbox.height);
          ctx.fillStyle = shade("--band");
          ctx.fillRect(bbox.left, high, bbox.width, low - high);
        }
        ctx.fillStyle = shade("--bad");
        for (const step of alarms) ctx.fillRect(Math.round(u.valToPos(step, "x", true)), bbox.top, devicePixelRatio, bbox.height);
      }] },
    }, data, card);
    state.charts.push(plot);
  }

  megarl.views.Curves = {
    async draw(root) {
      for (const plot of state.charts) plot.destroy();
      state.charts = [];
      state.opened.clear();
      const all = names(), shown = all.slice(0, state.shown);
      const redraw = () => this.draw(root);
      if (!root.firstChild) {
        const onInput = (event) => { clearTimeout(state.timer); state.filter = event.target.value.trim(); state.shown = 12; state.timer = setTimeout(redraw, 200); };
        root.append(el("div", { class: "bar" },
          el("input", { type: "search", placeholder: "figures with this in their names", oninput: onInput }),
          el("label", {}, "smoothing ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, onchange: (event) => { state.smooth = +event.target.value; redraw(); } })),
          el("span", { class: "legend", id: "runs-legend" })), el("div", { class: "charts" }), el("div", { class: "bar more" }), el("div", { class: "alarms" }));
      }
      const legend = root.querySelector("#runs-legend"), grid = root.querySelector(".charts");
      legend.replaceChildren(...megarl.overview.runs.map((run, i) => {
        const swatch = el("i");
        swatch.style.background = COLOURS[i % COLOURS.length];
        return el("span", { title: run.path }, swatch, `${run.name} (${run.algorithm})`);
      }));
      const cards = shown.map(() => el("section", { class: "card" }));
      grid.replaceChildren(...(cards.length ? cards : [el("p", { class: "faint" }, "There are no such figures.")]));
      await Promise.all(shown.map((name, i) => chart(name, cards[i])));
      root.querySelector(".more").replaceChildren(...(all.length > shown.length
        ? [el("button", { onclick: () => { state.shown += 24; redraw(); } }, `${all.length - shown.length} more figures`)] : []));
      const alarms = megarl.overview.runs.flatMap((run) => run.alarms.map((alarm) => [run.name, ...alarm]));
      root.querySelector(".alarms").replaceChildren(...(alarms.length ? [el("section", { class: "card" }, el("h3", {}, `Alarms (${alarms.length})`),
        el("ul", {}, ...alarms.slice(-100).reverse().map(([run, , time, text]) => el("li", {}, el("span", { class: "faint" }, `${time} ${megarl.overview.runs.length > 1 ? run : ""} `), text))))] : []));
    },
  };
}
