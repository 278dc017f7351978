"use strict";
// Tabs, run selection, light and dark theme, and polling of a live run.
{
  const POLL_MS = 5000;
  const VIEWS = ["Live", "Curves", "Time", "Rollouts", "Held-out", "Prompts", "Compare", "Configuration", "Files"];
  const ROLLOUT_VIEWS = ["Rollouts", "Held-out", "Prompts", "Compare"];
  const MAX_OPEN_NOTES = 3; // more notes are folded
  const THEME_KEY = "megarl-theme";
  const state = { view: "", roots: {}, resizeTimer: 0 };

  const getElement = (id) => document.getElementById(id);

  function drawNotes() {
    const notes = megarl.overview.runs.flatMap((run) => run.notes);
    const box = getElement("notes");
    box.hidden = !notes.length;
    box.open = box.open || notes.length <= MAX_OPEN_NOTES;
    const count = notes.length === 1 ? "1 note" : `${notes.length} notes`;
    box.querySelector("summary").textContent = `${count} about the data`;
    box.querySelector("ul").replaceChildren(...notes.map((note) => el("li", {}, note)));
  }

  function drawStatus() {
    const run = megarl.overview.runs[megarl.runIndex];
    const parts = [run.algorithm, run.steps.length ? `step ${run.steps.at(-1)}` : "no step yet"];
    if (run.generates_rollouts) parts.push(`${formatCount(run.num_rollouts)} rollouts`);
    if (run.is_running) parts.push("running");
    if (megarl.overview.is_live) parts.push("live");
    getElement("status").textContent = parts.join(", ");
  }

  function drawHeader() {
    drawNotes();
    drawStatus();
  }

  // options: {isStale}, whether its data or size has changed since it was drawn.
  megarl.showView = async (name, options = {}) => {
    state.view = name;
    try {
      history.replaceState(null, "", "#" + name);
    } catch {
      // Some browsers do not allow it for pages on disk.
    }
    for (const button of getElement("tabs").children) button.classList.toggle("selected", button.textContent === name);
    for (const [other, root] of Object.entries(state.roots)) root.hidden = other !== name;
    try {
      await megarl.views[name].draw(state.roots[name], options);
    } catch (error) {
      state.roots[name].replaceChildren(el("p", { class: "error" }, String(error.message)));
    }
  };

  function loadTheme() {
    try {
      const theme = localStorage.getItem(THEME_KEY);
      if (theme) document.documentElement.dataset.theme = theme;
    } catch {
      // Storage is not available.
    }
  }

  function toggleTheme() {
    const selected = document.documentElement.dataset.theme;
    const isDark = selected ? selected === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = isDark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(THEME_KEY, theme);
    } catch {
      // Storage is not available.
    }
    megarl.showView(state.view);
  }

  async function refresh() {
    const before = megarl.overview.runs;
    megarl.overview = await megarl.requestBlock("overview");
    const { runs } = megarl.overview;
    const hasChanged = (getCount) => runs.some((run, i) => getCount(run) !== getCount(before[i]));
    const hasNewRollouts = hasChanged((run) => run.num_rollouts);
    const hasNewEvaluations = hasChanged((run) => run.num_evaluated);
    const hasNewSteps = hasChanged((run) => run.steps.length);
    const hasNewAlarms = hasChanged((run) => run.alarms.length);
    if (hasNewRollouts || hasNewEvaluations) megarl.dropTables();
    drawHeader();
    const isChart = state.view === "Curves" || state.view === "Time";
    if (state.view === "Live" || (isChart && (hasNewRollouts || hasNewSteps || hasNewAlarms))) {
      await megarl.showView(state.view);
    }
    const hasNewRows = { Rollouts: hasNewRollouts, "Held-out": hasNewEvaluations }[state.view];
    if (hasNewRows) await megarl.showView(state.view, { isStale: true });
  }

  async function poll() {
    try {
      await refresh();
    } catch (error) {
      getElement("status").textContent = error.message;
    }
    setTimeout(poll, POLL_MS);
  }

  function createRunSelector() {
    const { runs } = megarl.overview;
    const selector = getElement("run");
    selector.append(...runs.map((run, i) => el("option", { value: i }, run.name)));
    getElement("run-label").hidden = runs.length < 2;
    selector.onchange = () => {
      megarl.runIndex = +selector.value;
      drawHeader();
      megarl.showView(state.view);
    };
  }

  // Whether there is anything to see. A live run may evaluate later.
  function hasView(name) {
    const { runs, is_live: isLive } = megarl.overview;
    const generating = runs.filter((run) => run.generates_rollouts);
    if (ROLLOUT_VIEWS.includes(name) && !generating.length) return false;
    if (name === "Live") return isLive;
    if (name === "Compare") return generating.length > 1;
    if (name === "Held-out") return isLive || runs.some((run) => run.num_evaluated);
    return true;
  }

  function createTabs() {
    for (const name of VIEWS) {
      if (!hasView(name)) continue;
      state.roots[name] = el("div", { hidden: true });
      getElement("views").append(state.roots[name]);
      getElement("tabs").append(el("button", { onclick: () => megarl.showView(name) }, name));
    }
  }

  function redrawOnResize() {
    let width = innerWidth;
    const redraw = () => {
      if (innerWidth === width) return;
      width = innerWidth;
      megarl.showView(state.view, { isStale: true });
    };
    addEventListener("resize", () => {
      clearTimeout(state.resizeTimer);
      state.resizeTimer = setTimeout(redraw, 300);
    });
  }

  // Records when the first view was drawn, in ms, for tests.
  function markReady() {
    document.documentElement.dataset.ready = Math.round(performance.now());
  }

  async function start() {
    megarl.page = megarl.parseInlineBlock("page");
    megarl.overview = megarl.parseInlineBlock("overview");
    loadTheme();
    createRunSelector();
    createTabs();
    getElement("theme").onclick = toggleTheme;
    drawHeader();
    const [view, condition] = location.hash.slice(1).split("?");
    if (condition) megarl.filterRollouts(decodeURIComponent(condition));
    await megarl.showView(state.roots[view] ? view : Object.keys(state.roots)[0]);
    redrawOnResize();
    requestAnimationFrame(() => setTimeout(markReady));
    if (megarl.overview.is_live) setTimeout(poll, POLL_MS);
  }

  start();
}
