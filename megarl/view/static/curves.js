"use strict";
// Charts of metrics by step, all runs in each, with bands, smoothed lines over raw ones, and alarms.
{
  const FIRST_METRICS = [
    "rollout/reward_mean",
    "eval/reward_greedy",
    "eval/reward_sampled",
    "actor/nll",
    "reward_model/loss",
    "rewards/accuracy",
    "reward_model/accuracy",
    "eval/nll",
    "eval/loss",
    "eval/accuracy",
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
    isWallClock: false, // whether the x axis has hours since the run's first step, not steps
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

  // Returns the place of each step of a run on the x axis; NaN if its time is not recorded.
  function getPositions(run) {
    if (!state.isWallClock) return run.steps;
    const first = run.times.find((time) => time !== null);
    return run.times.map((time) => (time === null ? NaN : (time - first) / 3600));
  }

  // Returns a run's values at `positions`, null where it has none.
  function alignValues(run, column, positions) {
    const valueByPosition = new Map(getPositions(run).map((position, i) => [position, column[i]]));
    return positions.map((position) => {
      const value = valueByPosition.get(position);
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
  function createTitle(name, band, isWatched, numOutside, newestValues, savePicture) {
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
    const save = el("button", { class: "small", title: "save as PNG", onclick: savePicture }, "PNG");
    return el("h3", { title: tooltip.join("\n") }, name, el("span", {}, el("span", { class: className }, summary), save));
  }

  function drawBand({ ctx, bbox, valToPos }, band) {
    const bottom = bbox.top + bbox.height;
    const toPixel = (value) => Math.min(bottom, Math.max(bbox.top, valToPos(value, "y", true)));
    const high = band.upper === null ? bbox.top : toPixel(band.upper);
    const low = band.lower === null ? bottom : toPixel(band.lower);
    ctx.fillStyle = getThemeColor("--band");
    ctx.fillRect(bbox.left, high, bbox.width, low - high);
  }

  function drawAlarms({ ctx, bbox, valToPos }, positions) {
    ctx.fillStyle = getThemeColor("--error");
    for (const position of positions) {
      ctx.fillRect(Math.round(valToPos(position, "x", true)), bbox.top, devicePixelRatio, bbox.height);
    }
  }

  // Saves a chart with its title, on the background of the page.
  function saveChart(name, plot) {
    const source = plot.ctx.canvas;
    const margin = 24 * devicePixelRatio;
    const canvas = el("canvas", { width: source.width, height: source.height + margin });
    const context = canvas.getContext("2d");
    context.fillStyle = getThemeColor("--card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = getThemeColor("--text");
    context.font = `600 ${13 * devicePixelRatio}px system-ui`;
    context.fillText(name, margin / 3, margin * 0.7);
    context.drawImage(source, 0, margin);
    canvas.toBlob((blob) => download(`${name.replaceAll("/", "_")}.png`, blob));
  }

  // Returns the metrics that match the filter as CSV: a line for each step of each run.
  async function formatTable() {
    const names = listMetrics();
    const quote = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
    const lines = [["run", "step", "time", ...names].map(quote).join(",")];
    for (const run of megarl.overview.runs) {
      const columns = await Promise.all(names.map((name) => loadMetric(run, name)));
      run.steps.forEach((step, i) => {
        const values = columns.map((column) => (column && !Number.isNaN(column[i]) ? +column[i].toPrecision(7) : ""));
        lines.push([run.name, step, run.times[i] ?? "", ...values].map(quote).join(","));
      });
    }
    return lines.join("\n") + "\n";
  }

  async function saveTable() {
    download("metrics.csv", new Blob([await formatTable()], { type: "text/csv" }));
  }

  async function drawChart(name, card) {
    const runs = megarl.overview.runs;
    const columns = await Promise.all(runs.map((run) => loadMetric(run, name)));
    const places = runs.flatMap((run, i) => (columns[i] ? getPositions(run) : [])).filter((place) => !Number.isNaN(place));
    const positions = [...new Set(places)].sort((a, b) => a - b);
    const band = runs.map((run) => run.bands[name]).find(Boolean);
    const isWatched = runs.some((run) => run.has_band_alarms && run.bands[name]);
    const lines = [];
    const newestValues = [];
    let numOutside = 0;
    runs.forEach((run, i) => {
      if (!columns[i]) return;
      const values = alignValues(run, columns[i], positions);
      const present = values.filter((value) => value !== null);
      if (present.length) newestValues.push([run.name, present.at(-1)]);
      if (band) numOutside += present.filter((value) => isOutside(band, value)).length;
      lines.push(...createLines(runs.length > 1 ? run.name : "value", getColor(i), values));
    });
    let plot = null;
    const savePicture = () => saveChart(name, plot);
    card.replaceChildren(createTitle(name, band, isWatched, numOutside, newestValues, savePicture));

    const alarmPositions = runs.flatMap((run) => {
      const alarms = run.alarms.filter(([, , text]) => text.includes(name));
      return alarms.map(([step]) => getPositions(run)[run.steps.indexOf(step)] ?? NaN);
    });
    const drawBackground = (drawn) => {
      if (band) drawBand(drawn, band);
      drawAlarms(drawn, alarmPositions.filter((position) => !Number.isNaN(position)));
    };
    const formatTicks = (_, ticks) => ticks.map((tick) => formatNumber(tick, 5));
    const xAxis = state.isWallClock ? { values: (_, ticks) => ticks.map((tick) => `${formatNumber(tick, 3)} h`) } : undefined;
    const xSeries = state.isWallClock ? { label: "hours", value: (_, hours) => formatNumber(hours) } : { label: "step" };
    const options = {
      width: Math.max(200, card.clientWidth - 22),
      height: 190,
      cursor: { sync: { key: state.isWallClock ? "hours" : "steps" }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => getRange(name, low, high) } },
      legend: { live: true },
      axes: createAxes({ size: 54, values: formatTicks }, xAxis),
      series: [xSeries, ...lines.map(([series]) => series)],
      hooks: { drawClear: [drawBackground] },
    };
    plot = new uPlot(options, [positions, ...lines.map(([, values]) => values)], card);
    state.plots.push(plot);
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
    const changeAxis = (event) => {
      state.isWallClock = event.target.value === "hours";
      redraw();
    };
    const axes = ["steps", "hours"].map((name) => el("option", { value: name }, name));
    const slider = { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, onchange: changeSmoothing };
    return el(
      "div",
      { class: "toolbar" },
      el("input", { type: "search", placeholder: "filter metrics by name", oninput: filter }),
      el("label", {}, "smoothing ", el("input", slider)),
      el("label", {}, "over ", el("select", { id: "x-axis", onchange: changeAxis }, ...axes)),
      el("button", { title: "save the metrics that match the filter", onclick: saveTable }, "CSV"),
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

  megarl.formatMetrics = formatTable;

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
