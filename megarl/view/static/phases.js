"use strict";
// Step times by phase, and a timeline of the last steps.
{
  // Layout in pixels.
  const STEP_CHART = { left: 50, right: 10, barHeight: 190, baseline: 205, labelBaseline: 222, height: 230 };
  const TIMELINE = { left: 130, right: 10, top: 24, rowHeight: 20, barHeight: 15 };
  const MAX_STEP_LABELS = 9;
  const STEP_LABEL_WIDTH = 58;
  const MIN_OTHER_SHARE = 0.01; // time outside of all phases is shown from this share on
  const colors = new Map();

  function getPhaseColor(phase) {
    if (phase === "wait") return getThemeColor("--line");
    if (phase === "data" || phase === "other") return getThemeColor("--muted");
    if (!colors.has(phase)) colors.set(phase, getColor(colors.size));
    return colors.get(phase);
  }

  function createCanvas(width, height) {
    const canvas = el("canvas", { width: width * devicePixelRatio, height: height * devicePixelRatio });
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = "11px system-ui";
    return [canvas, context];
  }

  // labels: [phase, text] of each item.
  function createLegend(labels) {
    const items = labels.map(([phase, text]) => createLegendItem(getPhaseColor(phase), text));
    return el("div", { class: "legend" }, ...items);
  }

  const sum = (values) => values.reduce((total, value) => total + (Number.isNaN(value) ? 0 : value), 0);

  // Returns seconds by step: `totals`, and `phases` as [{name, seconds}], the longest first.
  async function loadStepTimes(run) {
    const names = Object.keys(run.metrics).filter((name) => name.startsWith("time/") && name !== "time/step");
    const totals = await megarl.unpackColumn(run.metrics["time/step"]);
    const columns = await Promise.all(names.map((name) => megarl.unpackColumn(run.metrics[name])));
    const phases = names.map((name, i) => ({ name: name.slice("time/".length), seconds: columns[i] }));
    phases.sort((a, b) => sum(b.seconds) - sum(a.seconds));
    return { totals, phases };
  }

  // Returns the stacked [phase, seconds] of a step. Phases that exceed its total are cut off.
  function stackPhases(totals, phases, row) {
    const stack = [];
    let rest = totals[row];
    for (const { name, seconds } of phases) {
      if (!(seconds[row] > 0)) continue;
      stack.push([name, Math.min(rest, seconds[row])]);
      rest -= seconds[row];
    }
    if (rest > MIN_OTHER_SHARE * totals[row]) stack.push(["other", rest]);
    return stack;
  }

  function drawStepBars(context, width, run, totals, phases) {
    const rows = run.steps.map((_, i) => i).filter((i) => totals[i] > 0);
    const longest = rows.reduce((maximum, row) => Math.max(maximum, totals[row]), 0) || 1;
    const pitch = (width - STEP_CHART.left - STEP_CHART.right) / rows.length;
    const barWidth = Math.max(pitch - (pitch > 4 ? 1 : 0), 0.6);
    rows.forEach((row, i) => {
      let top = STEP_CHART.baseline;
      for (const [phase, seconds] of stackPhases(totals, phases, row)) {
        const height = Math.max(0, (seconds / longest) * STEP_CHART.barHeight);
        top -= height;
        context.fillStyle = getPhaseColor(phase);
        context.fillRect(STEP_CHART.left + i * pitch, top, barWidth, height);
      }
    });
    context.fillStyle = getThemeColor("--muted");
    context.fillText(formatNumber(longest, 3) + " s", 4, 20);
    context.fillText("0", 4, STEP_CHART.baseline);
    for (let k = 0; k < MAX_STEP_LABELS && rows.length; k++) {
      const i = Math.round((k * (rows.length - 1)) / (MAX_STEP_LABELS - 1));
      const x = Math.min(STEP_CHART.left + i * pitch, width - STEP_LABEL_WIDTH);
      context.fillText("step " + run.steps[rows[i]], x, STEP_CHART.labelBaseline);
    }
  }

  async function createStepChart(run, width) {
    if (!run.metrics["time/step"]) return createHint("No step times recorded yet.");
    const { totals, phases } = await loadStepTimes(run);
    const [canvas, context] = createCanvas(width, STEP_CHART.height);
    drawStepBars(context, width, run, totals, phases);
    const total = sum(totals) || 1;
    const formatShare = (seconds) => `${((100 * seconds) / total).toFixed(1)} %`;
    const labels = phases.map(({ name, seconds }) => [name, `${name} ${formatShare(sum(seconds))}`]);
    const other = total - phases.reduce((all, { seconds }) => all + sum(seconds), 0);
    if (other > MIN_OTHER_SHARE * total) labels.push(["other", `other ${formatShare(other)}`]);
    return el("div", {}, canvas, createLegend(labels));
  }

  function drawTimeline(context, timeline, pixelsPerSecond) {
    const toX = (seconds) => TIMELINE.left + seconds * pixelsPerSecond;
    timeline.rows.forEach((row, i) => {
      const top = TIMELINE.top + i * TIMELINE.rowHeight;
      context.fillStyle = getThemeColor("--text");
      context.fillText(row.name.slice(0, 22), 4, top + 10);
      for (const [phase, , begin, end] of row.spans) {
        context.fillStyle = getPhaseColor(phase);
        context.fillRect(toX(begin), top, Math.max(0.5, (end - begin) * pixelsPerSecond), TIMELINE.barHeight);
      }
    });
    context.fillStyle = getThemeColor("--muted");
    for (const [step, begin] of timeline.begins) {
      context.fillRect(toX(begin), 8, 1, timeline.rows.length * TIMELINE.rowHeight + 16);
      context.fillText("step " + step, toX(begin) + 4, 16);
    }
  }

  function describePosition(timeline, rowIndex, time) {
    const row = timeline.rows[rowIndex];
    const span = row && row.spans.find(([, , begin, end]) => begin <= time && time <= end);
    if (!span) return `${time.toFixed(3)} s`;
    const [, name, begin, end] = span;
    return `${row.name}: ${name}, ${(end - begin).toFixed(3)} s, from ${begin.toFixed(3)} s`;
  }

  // Returns [phase, text] of each phase in a timeline, the longest first.
  function createTimelineLabels(timeline) {
    const seconds = new Map();
    for (const row of timeline.rows) {
      for (const [phase, , begin, end] of row.spans) seconds.set(phase, (seconds.get(phase) || 0) + end - begin);
    }
    const longestFirst = [...seconds].sort((a, b) => b[1] - a[1]);
    return longestFirst.map(([phase, total]) => [phase, `${phase} ${total.toFixed(2)} s`]);
  }

  function createTimeline(timeline, width) {
    const [canvas, context] = createCanvas(width, TIMELINE.top + timeline.rows.length * TIMELINE.rowHeight);
    const pixelsPerSecond = (width - TIMELINE.left - TIMELINE.right) / timeline.length;
    drawTimeline(context, timeline, pixelsPerSecond);
    const details = el("div", { class: "hover-details" }, "Hover over a span.");
    canvas.onmousemove = (event) => {
      const rowIndex = Math.floor((event.offsetY - TIMELINE.top) / TIMELINE.rowHeight);
      const time = (event.offsetX - TIMELINE.left) / pixelsPerSecond;
      details.textContent = describePosition(timeline, rowIndex, time);
    };
    return el("div", {}, canvas, details, createLegend(createTimelineLabels(timeline)));
  }

  megarl.views.Time = {
    async draw(root) {
      const run = megarl.overview.runs[megarl.runIndex];
      const timeline = run.timeline;
      const width = Math.max(280, root.clientWidth - 24);
      const stepTitle = el("h3", {}, "Seconds per step, by phase");
      const stepCard = el("section", { class: "card" }, stepTitle, await createStepChart(run, width));
      const timelineCard = el("section", { class: "card" }, el("h3", {}, "Timeline of the last steps"));
      if (!timeline) {
        const reason = "no step is done yet, or an older version of MegaRL wrote the run";
        timelineCard.append(createHint(`No timeline recorded: ${reason}.`));
      } else {
        if (timeline.rows.length) timelineCard.append(createTimeline(timeline, width));
        timelineCard.append(...timeline.notes.map(createHint));
      }
      root.replaceChildren(stepCard, el("p"), timelineCard);
    },
  };
}
