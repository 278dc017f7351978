"use strict";
// A running job at a glance: its ranks and engines now, metrics outside of their bands, alarms, and newest rollouts.
{
  const MAX_ALARMS = 10;
  const SHOWN_METRICS = ["rollout/reward_mean", "actor/entropy", "time/step"];
  const ENGINE_PREFIX = "engine/";
  const RANK_COLUMNS = ["rank", "step", "phase", "for", "requests", "waiting", "conversations", "KV cache"];

  const createCard = (title, ...content) => el("section", { class: "card" }, el("h3", {}, title), ...content);

  function createKeys(names, rows) {
    const head = el("tr", {}, ...names.map((name) => el("th", {}, name)));
    const lines = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell))));
    return el("div", { class: "wide" }, el("table", { class: "keys" }, head, ...lines));
  }

  function createRanks({ statuses }) {
    if (!statuses.length) {
      return createHint("No rank reports what it does: the run has ended, or it is about to start.");
    }
    const rows = statuses.map((status) => [
      ...[String(status.rank), String(status.step), (status.phase || "between phases").replaceAll("_", " ")],
      ...[`${Math.round(status.seconds)} s`, formatNumber(status.running), formatNumber(status.waiting)],
      formatNumber(status.conversations),
      status.cache_usage === undefined ? "–" : `${Math.round(100 * status.cache_usage)} %`,
    ]);
    const hasEngines = statuses.some((status) => status.running !== undefined);
    const names = hasEngines ? RANK_COLUMNS : RANK_COLUMNS.slice(0, 4);
    return createKeys(names, rows.map((cells) => cells.slice(0, names.length)));
  }

  // Returns the newest value of each metric.
  async function loadNewestValues(run) {
    const names = Object.keys(run.metrics);
    const columns = await Promise.all(names.map((name) => megarl.unpackColumn(run.metrics[name])));
    const values = columns.map((column) => Array.from(column).findLast((value) => !Number.isNaN(value)));
    return new Map(names.map((name, i) => [name, values[i]]));
  }

  // Returns [metric, value, limit, remedy] of metrics that are outside of their bands.
  function findOutside(run, values) {
    const rows = [];
    for (const [name, { lower, upper, low_remedy: lowRemedy, high_remedy: highRemedy }] of Object.entries(run.bands)) {
      const value = values.get(name);
      if (value === undefined) continue;
      if (lower !== null && value < lower) rows.push([name, formatNumber(value), `below ${lower}`, lowRemedy]);
      if (upper !== null && value > upper) rows.push([name, formatNumber(value), `above ${upper}`, highRemedy]);
    }
    return rows;
  }

  function createAlarms(run, values) {
    const parts = [];
    const outside = findOutside(run, values);
    if (outside.length) parts.push(createKeys(["metric", "now", "band", "remedy"], outside));
    const newest = run.alarms.slice(-MAX_ALARMS).reverse();
    if (newest.length) {
      const items = newest.map(([, time, text]) => el("li", {}, el("span", { class: "muted" }, time + " "), text));
      parts.push(el("div", { class: "alarms" }, el("ul", {}, ...items)));
    }
    return parts.length ? parts : [createHint("No alarm, and all metrics are within their bands.")];
  }

  function createNewest(rollouts) {
    if (!rollouts.length) return createHint("No step is recorded yet.");
    const items = rollouts.map(({ step, number, reward, status, text }) => {
      const open = () => {
        megarl.filterRollouts(`step=${step} and number=${number}`);
        megarl.showView("Rollouts");
      };
      const title = `step ${step}, rollout ${number}: reward ${formatNumber(reward)}, ${status}`;
      return el("div", { class: "newest" }, el("button", { class: "small", onclick: open }, title), el("div", { class: "text" }, text));
    });
    return el("div", {}, ...items);
  }

  megarl.views.Live = {
    async draw(root) {
      const run = megarl.overview.runs[megarl.runIndex];
      const [values, newest] = await Promise.all([
        loadNewestValues(run),
        megarl.requestBlock("newest-" + megarl.runIndex),
      ]);
      const pick = (names) => names.filter((name) => values.has(name)).map((name) => [name, formatNumber(values.get(name))]);
      const engines = pick(Object.keys(run.metrics).filter((name) => name.startsWith(ENGINE_PREFIX)));
      const metrics = pick(SHOWN_METRICS);
      const cards = [
        createCard("Ranks now", createRanks(run)),
        createCard("Alarms and remedies", ...createAlarms(run, values)),
        createCard("Last step", metrics.length ? createKeys(["metric", "value"], metrics) : createHint("No step is done yet.")),
        ...(engines.length ? [createCard("Engines in the last step", createKeys(["metric", "value"], engines))] : []),
        ...(run.generates_rollouts ? [createCard("Newest rollouts", createNewest(newest))] : []),
      ];
      root.replaceChildren(el("div", { class: "live" }, ...cards));
    },
  };
}
