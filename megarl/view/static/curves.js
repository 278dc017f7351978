"use strict";
// Charts of metrics by step, all runs in each, with bands, smoothed lines over raw ones, and alarms.
{
  const FIRST_METRICS = [
    "rollout/reward_mean",
    "eval/reward_greedy",
    "eval/reward_sampled",
    "rollout/response_length_mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/kl_to_reference",
    "rollout/reward_variance",
    "actor/advantage_variance",
    "actor/pg_loss",
    "critic/vf_loss",
    "rollout/zero_spread_frac",
    "rollout/truncated_frac",
    "rollout/tool_errors",
    "time/step",
    "perf/tokens_per_second_per_rank",
  ];
  const INITIAL_CHARTS = 12;
  const MORE_CHARTS = 24;
  const MAX_ALARMS = 100;
  const MIN_POINTS_TO_SMOOTH = 40;
  const state = {
    smoothing: 0.6, // decay of the moving average
    filter: "",
    filterTimer: 0,
    numCharts: INITIAL_CHARTS,
    plots: [],
    columns: new Map(), // promises of metrics by their packed columns
  };

  // Debiased exponential moving average; `decay` is that of past values. null is skipped.
  function smooth(values, decay) {
    let mean = 0;
    let totalWeight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = decay * mean + (1 - decay) * value;
      totalWeight = decay * totalWeight + (1 - decay);
      return mean / totalWeight;
    });
  }

  async function loadMetric(run, name) {
    const packed = run.metrics[name];
    if (!packed) return null;
    if (!state.columns.has(packed)) state.columns.set(packed, megarl.unpackColumn(packed));
    return state.columns.get(packed);
  }

  function listMetrics() {
    const names = [...new Set(megarl.overview.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    if (state.filter) return names.filter((name) => name.includes(state.filter));
    const first = FIRST_METRICS.filter((name) => names.includes(name));
    return [...first, ...names.filter((name) => !FIRST_METRICS.includes(name))];
  }

  // Metrics are float32 here, and bands are not; the tolerance covers the difference.
  function isOutside(band, value) {
    const { lower, upper } = band;
    const isBelow = lower !== null && value < lower * (1 - 1e-3 * Math.sign(lower));
    const isAbove = upper !== null && value > upper * (1 + 1e-3 * Math.sign(upper));
    return isBelow || isAbove;
  }

  function formatBand({ lower, upper }) {
    if (lower === null) return `≤ ${upper}`;
    if (upper === null) return `≥ ${lower}`;
    return `${lower} to ${upper}`;
  }

  // Returns the y range. Constant metrics get one, too: uPlot's own is empty below double precision.
  function getRange(name, low, high) {
    if (low === null || high === null) return [0, 1];
    const minSpan = Math.max(1e-4 * Math.max(Math.abs(low), Math.abs(high)), 1e-12);
    if (high - low >= minSpan) {
      const margin = 0.08 * (high - low);
      return [low - margin, high + margin];
    }
    if (low === 0 && name.endsWith("_frac")) return [0, 1];
    if (low === high) {
      const margin = low === 0 ? 1 : 0.1 * Math.abs(low); // wide enough for few digits on the axis
      return [low - margin, high + margin];
    }
    return [low - minSpan, high + minSpan];
  }

  // Returns a run's values at `steps`, null where it has none.
  function alignValues(run, column, steps) {
    const valueByStep = new Map(run.steps.map((step, i) => [step, column[i]]));
    return steps.map((step) => {
      const value = valueByStep.get(step);
      return value === undefined || Number.isNaN(value) ? null : value;
    });
  }

  // Returns [uPlot series, values] of a run: its line, and a smoothed line if it has many values.
  function createLines(label, color, values) {
    const isShort = values.filter((value) => value !== null).length < MIN_POINTS_TO_SMOOTH;
    const isSmoothed = state.smoothing > 0 && !isShort;
    const format = (_, value) => formatNumber(value);
    const raw = {
      label,
      stroke: isSmoothed ? color + "55" : color,
      width: isSmoothed ? 1 : 1.6,
      spanGaps: true,
      points: { show: isShort, size: 4 },
      value: format,
    };
    if (!isSmoothed) return [[raw, values]];
    const smoothed = {
      label: "smoothed",
      stroke: color,
      width: 1.8,
      spanGaps: true,
      points: { show: false },
      value: format,
    };
    return [
      [raw, values],
      [smoothed, smooth(values, state.smoothing)],
    ];
  }

  // newestValues: [run name, value] of each run that has the metric.
  function createTitle(name, band, isWatched, numOutside, newestValues) {
    const newest = `last ${newestValues.map(([, value]) => formatNumber(value)).join(" and ")}`;
    let summary = newest;
    if (band && isWatched) summary = `${numOutside ? `${numOutside} outside` : "within"} ${formatBand(band)}`;
    // A band that no guard watches is a default, which may not fit this run, so values outside are not counted.
    else if (band) summary = `${newest}, typical ${formatBand(band)}`;
    const tooltip = [];
    if (newestValues.length > 1) {
      tooltip.push(...newestValues.map(([run, value]) => `${run}: last ${formatNumber(value)}`));
    }
    if (band && band.low_remedy) tooltip.push("below: " + band.low_remedy);
    if (band && band.high_remedy) tooltip.push("above: " + band.high_remedy);
    const className = numOutside && isWatched ? "error" : "";
    return el("h3", { title: tooltip.join("\n") }, name, el("span", { class: className }, summary));
  }

  function drawBand({ ctx, bbox, valToPos }, band) {
    const bottom = bbox.top + bbox.height;
    const toPixel = (value) => Math.min(bottom, Math.max(bbox.top, valToPos(value, "y", true)));
    const high = band.upper === null ? bbox.top : toPixel(band.upper);
    const low = band.lower === null ? bottom : toPixel(band.lower);
    ctx.fillStyle = getThemeColor("--band");
    ctx.fillRect(bbox.left, high, bbox.width, low - high);
  }

  function drawAlarms({ ctx, bbox, valToPos }, alarmSteps) {
    ctx.fillStyle = getThemeColor("--error");
    for (const step of alarmSteps) {
      ctx.fillRect(Math.round(valToPos(step, "x", true)), bbox.top, devicePixelRatio, bbox.height);
    }
  }

  async function drawChart(name, card) {
    const runs = megarl.overview.runs;
    const columns = await Promise.all(runs.map((run) => loadMetric(run, name)));
    const steps = [...new Set(runs.flatMap((run, i) => (columns[i] ? run.steps : [])))].sort((a, b) => a - b);
    const band = runs.map((run) => run.bands[name]).find(Boolean);
    const isWatched = runs.some((run) => run.has_band_alarms && run.bands[name]);
    const lines = [];
    const newestValues = [];
    let numOutside = 0;
    runs.forEach((run, i) => {
      if (!columns[i]) return;
      const values = alignValues(run, columns[i], steps);
      const present = values.filter((value) => value !== null);
      if (present.length) newestValues.push([run.name, present.at(-1)]);
      if (band) numOutside += present.filter((value) => isOutside(band, value)).length;
      lines.push(...createLines(runs.length > 1 ? run.name : "value", getColor(i), values));
    });
    card.replaceChildren(createTitle(name, band, isWatched, numOutside, newestValues));

    const alarms = runs.flatMap((run) => run.alarms).filter(([, , text]) => text.includes(name));
    const alarmSteps = alarms.map(([step]) => step);
    const drawBackground = (plot) => {
      if (band) drawBand(plot, band);
      drawAlarms(plot, alarmSteps);
    };
    const options = {
      width: Math.max(200, card.clientWidth - 22),
      height: 190,
      cursor: { sync: { key: "steps" }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => getRange(name, low, high) } },
      legend: { live: true },
      axes: createAxes({ size: 54, values: (_, ticks) => ticks.map((tick) => formatNumber(tick, 5)) }),
      series: [{ label: "step" }, ...lines.map(([series]) => series)],
      hooks: { drawClear: [drawBackground] },
    };
    state.plots.push(new uPlot(options, [steps, ...lines.map(([, values]) => values)], card));
  }

  function createToolbar(redraw) {
    const filter = (event) => {
      clearTimeout(state.filterTimer);
      state.filter = event.target.value.trim();
      state.numCharts = INITIAL_CHARTS;
      state.filterTimer = setTimeout(redraw, 200);
    };
    const changeSmoothing = (event) => {
      state.smoothing = +event.target.value;
      redraw();
    };
    const slider = { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, onchange: changeSmoothing };
    return el(
      "div",
      { class: "toolbar" },
      el("input", { type: "search", placeholder: "filter metrics by name", oninput: filter }),
      el("label", {}, "smoothing ", el("input", slider)),
      el("span", { class: "legend", id: "runs-legend" }),
    );
  }

  function createAlarmList() {
    const { runs } = megarl.overview;
    const alarms = runs.flatMap((run) => run.alarms.map(([, time, text]) => ({ run: run.name, time, text })));
    if (!alarms.length) return "";
    const items = alarms
      .slice(-MAX_ALARMS)
      .reverse()
      .map(({ run, time, text }) => {
        const origin = runs.length > 1 ? `${time} ${run} ` : `${time} `;
        return el("li", {}, el("span", { class: "muted" }, origin), text);
      });
    return el("section", { class: "card" }, el("h3", {}, `Alarms (${alarms.length})`), el("ul", {}, ...items));
  }

  megarl.views.Curves = {
    async draw(root) {
      for (const plot of state.plots) plot.destroy();
      state.plots = [];
      state.columns.clear();
      const redraw = () => this.draw(root);
      if (!root.firstChild) {
        const sections = ["charts", "toolbar more", "alarms"].map((name) => el("div", { class: name }));
        root.append(createToolbar(redraw), ...sections);
      }
      const legendItems = megarl.overview.runs.map((run, i) =>
        createLegendItem(getColor(i), `${run.name} (${run.algorithm})`, run.path),
      );
      root.querySelector("#runs-legend").replaceChildren(...legendItems);

      const names = listMetrics();
      const shown = names.slice(0, state.numCharts);
      const cards = shown.map(() => el("section", { class: "card" }));
      root.querySelector(".charts").replaceChildren(...(cards.length ? cards : [createHint("No metric matches.")]));
      await Promise.all(shown.map((name, i) => drawChart(name, cards[i])));

      const showMore = () => {
        state.numCharts += MORE_CHARTS;
        redraw();
      };
      const numHidden = names.length - shown.length;
      const more = numHidden ? el("button", { onclick: showMore }, `${numHidden} more metrics`) : "";
      root.querySelector(".more").replaceChildren(more);
      root.querySelector(".alarms").replaceChildren(createAlarmList());
    },
  };
}
