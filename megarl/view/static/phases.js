"use strict";
// Step times by phase, and a timeline of the last steps.
{
  const LEFT = 130;
  const hues = new Map();
  const colour = (kind) => {
    if (kind === "wait") return shade("--line");
    if (kind === "data") return shade("--faint");
    if (!hues.has(kind)) hues.set(kind, COLOURS[hues.size % COLOURS.length]);
    return hues.get(kind);
  };

  function canvas(width, height) {
    const element = el("canvas");
    element.width = width * devicePixelRatio;
    element.height = height * devicePixelRatio;
    element.style.width = width + "px";
    element.style.height = height + "px";
    const pen = element.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = "11px system-ui";
    return [element, pen];
  }

  function legend(kinds) {
    return el("div", { class: "legend" }, ...kinds.map(([kind, text]) => {
      const swatch = el("i");
      swatch.style.background = colour(kind);
      return el("span", {}, swatch, text);
    }));
  }

  async function steps(run, width) {
    const names = Object.keys(run.metrics).filter((name) => name.startsWith("time/") && name !== "time/step");
    if (!run.metrics["time/step"]) return el("p", { class: "faint" }, "There are no times of steps yet.");
    const totals = await megarl.column(run.metrics["time/step"]);
    const parts = await Promise.all(names.map((name) => megarl.column(run.metrics[name])));
    const sum = (values) => values.reduce((all, value) => all + (Number.isNaN(value) ? 0 : value), 0);
    const total = sum(totals) || 1;
    const order = names.map((_, i) => i).sort((a, b) => sum(parts[b]) - sum(parts[a]));
    const rows = run.steps.map((_, i) => i).filter((i) => totals[i] > 0);
    const [canvasElement, pen] = canvas(width, 230);
    const longest = rows.reduce((most, i) => Math.max(most, totals[i]), 0) || 1, barWidth = (width - 60) / rows.length;
    rows.forEach((row, index) => {
      let top = 205;
      const bar = (size, kind) => {
        const height = Math.max(0, (size / longest) * 190);
        pen.fillStyle = colour(kind);
        pen.fillRect(50 + index * barWidth, top - height, Math.max(barWidth - (barWidth > 4 ? 1 : 0), 0.6), height);
        top -= height;
      };
      let rest = totals[row];
      for (const i of order) if (parts[i][row] > 0) { bar(Math.min(rest, parts[i][row]), names[i].slice(5)); rest -= parts[i][row]; }
      if (rest > 0.01 * totals[row]) bar(rest, "data");
    });
    pen.fillStyle = shade("--faint");
    pen.fillText(said(longest, 3) + " s", 4, 20);
    pen.fillText("0", 4, 205);
    for (let k = 0; k <= 8 && rows.length; k++) {
      const index = Math.min(rows.length - 1, Math.round((k * (rows.length - 1)) / 8));
      pen.fillText("step " + run.steps[rows[index]], Math.min(50 + index * barWidth, width - 58), 222);
    }
    const shares = order.map((i) => [names[i].slice(5), `${names[i].slice(5)} ${((100 * sum(parts[i])) / total).toFixed(1)} %`]);
    const rest = total - parts.reduce((all, part) => all + sum(part), 0);
    if (rest > 0.01 * total) shares.push(["data", `all else ${((100 * rest) / total).toFixed(1)} %`]);
    return el("div", {}, canvasElement, legend(shares));
  }

  function spans(timeline, width) {
    const rowHeight = 20, [canvasElement, pen] = canvas(width, timeline.rows.length * rowHeight + 24), pixelsPerSecond = (width - LEFT - 10) / timeline.length;
    const kinds = new Map();
    timeline.rows.forEach((row, i) => {
      pen.fillStyle = shade("--text");
      pen.fillText(row.name.slice(0, 22), 4, 24 + i * rowHeight + 10);
      for (const [kind, , begin, end] of row.spans) {
        kinds.set(kind, (kinds.get(kind) || 0) + end - begin);
        pen.fillStyle = colour(kind);
        pen.fillRect(LEFT + begin * pixelsPerSecond, 24 + i * rowHeight, Math.max(0.5, (end - begin) * pixelsPerSecond), rowHeight - 5);
      }
    });
    pen.fillStyle = shade("--faint");
    for (const [step, begin] of timeline.begins) {
      pen.fillRect(LEFT + begin * pixelsPerSecond, 8, 1, timeline.rows.length * rowHeight + 16);
      pen.fillText("step " + step, LEFT + begin * pixelsPerSecond + 4, 16);
    }
    const about = el("div", { class: "about" }, "Point at a span.");
    canvasElement.onmousemove = (event) => {
      const row = timeline.rows[Math.floor((event.offsetY - 24) / rowHeight)], time = (event.offsetX - LEFT) / pixelsPerSecond;
      const span = row && row.spans.find(([, , begin, end]) => begin <= time && time <= end);
      about.textContent = span ? `${row.name}: ${span[1]}, ${(span[3] - span[2]).toFixed(3)} s, from ${span[2].toFixed(3)} s` : `${time.toFixed(3)} s`;
    };
    const order = [...kinds].sort((a, b) => b[1] - a[1]);
    return el("div", {}, canvasElement, about, legend(order.map(([kind, seconds]) => [kind, `${kind} ${seconds.toFixed(2)} s`])));
  }

  megarl.views.Time = {
    async draw(root) {
      const run = megarl.overview.runs[megarl.run], width = Math.max(400, root.clientWidth - 24);
      const first = el("section", { class: "card" }, el("h3", {}, "Seconds of each step, by phase"), await steps(run, width));
      const last = el("section", { class: "card" }, el("h3", {}, "Who did what when, in the last steps"));
      if (run.spans && run.spans.rows.length) last.append(spans(run.spans, width));
      else if (!run.spans) last.append(el("p", { class: "faint" }, "There is no timeline on record: no step is done yet, or the run is of a version that wrote none."));
      for (const note of (run.spans && run.spans.notes) || []) last.append(el("p", { class: "faint" }, note));
      root.replaceChildren(first, el("p"), last);
    },
  };
}
