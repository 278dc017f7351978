"use strict";
// Views, run selection, light and dark theme, and polling of a live run.
{
  const POLL = 10000;
  const NAMES = ["Curves", "Time", "Rollouts", "Prompts", "Compare"];
  const roots = {};
  let current = "";

  function notes() {
    const box = document.getElementById("notes"), all = megarl.overview.runs.flatMap((run) => run.notes);
    box.hidden = !all.length;
    box.open = box.open || all.length < 4;
    box.querySelector("summary").textContent = all.length === 1 ? "1 note on what was found" : `${all.length} notes on what was found`;
    box.querySelector("ul").replaceChildren(...all.map((note) => el("li", {}, note)));
    const run = megarl.overview.runs[megarl.run];
    document.getElementById("state").textContent = `${run.algorithm}, ${run.steps.length ? "step " + run.steps.at(-1) : "no step yet"}, ${run.rollouts.toLocaleString("en")} rollouts${run.running ? ", still running" : ""}${megarl.overview.live ? ", live" : ""}`;
  }

  megarl.go = async (name) => {
    current = name;
    try { history.replaceState(null, "", "#" + name); } catch { /* not allowed for file: pages */ }
    for (const button of document.getElementById("tabs").children) button.classList.toggle("on", button.textContent === name);
    for (const [other, root] of Object.entries(roots)) root.hidden = other !== name;
    try {
      await megarl.views[name].draw(roots[name]);
    } catch (error) {
      roots[name].replaceChildren(el("p", { class: "out" }, String(error.message)));
    }
  };

  function theme(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("megarl-theme", name); } catch { /* storage is not available */ }
  }

  async function poll() {
    try {
      const before = megarl.overview;
      megarl.overview = await megarl.fetch("overview");
      const hasNewRollouts = megarl.overview.runs.some((run, i) => run.rollouts !== before.runs[i].rollouts);
      const hasNews = hasNewRollouts || megarl.overview.runs.some((run, i) => run.steps.length !== before.runs[i].steps.length);
      if (hasNewRollouts) for (const name of [...megarl.known.keys()]) if (name.startsWith("index-")) megarl.known.delete(name);
      notes();
      if (hasNews && (current === "Curves" || current === "Time")) await megarl.go(current);
      if (hasNewRollouts && current === "Rollouts") { megarl.changed = true; await megarl.go(current); megarl.changed = false; }
    } catch (error) {
      document.getElementById("state").textContent = error.message;
    }
    setTimeout(poll, POLL);
  }

  async function start() {
    megarl.page = megarl.inline("page");
    megarl.overview = megarl.inline("overview");
    megarl.run = 0;
    let savedTheme = null;
    try { savedTheme = localStorage.getItem("megarl-theme"); } catch { /* storage is not available */ }
    if (savedTheme) document.documentElement.dataset.theme = savedTheme;
    const chooser = document.getElementById("run"), runs = megarl.overview.runs;
    chooser.append(...runs.map((run, i) => el("option", { value: i }, run.name)));
    document.getElementById("run-label").hidden = runs.length < 2;
    chooser.onchange = () => { megarl.run = +chooser.value; notes(); megarl.go(current); };
    document.getElementById("theme").onclick = () => {
      const chosen = document.documentElement.dataset.theme, dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      theme(dark ? "light" : "dark");
      megarl.go(current);
    };
    for (const name of NAMES.filter((other) => other !== "Compare" || runs.length > 1)) {
      roots[name] = el("div", { hidden: true });
      document.getElementById("views").append(roots[name]);
      document.getElementById("tabs").append(el("button", { onclick: () => megarl.go(name) }, name));
    }
    notes();
    const [view, query] = location.hash.slice(1).split("?");
    if (query) megarl.where(decodeURIComponent(query));
    await megarl.go(roots[view] ? view : "Curves");
    let width = innerWidth;
    addEventListener("resize", () => { clearTimeout(start.timer); start.timer = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; megarl.changed = true; megarl.go(current).then(() => { megarl.changed = false; }); } }, 300); });
    const ready = () => { document.documentElement.dataset.ready = Math.round(performance.now()); };
    requestAnimationFrame(() => setTimeout(ready));
    if (megarl.overview.live) setTimeout(poll, POLL);
  }
  start();
}
