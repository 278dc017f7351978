"use strict";
// Compares two runs side by side, from where they diverge.
{
  const state = { otherIndex: 1, step: null, number: null };

  // Returns the index of the first token that differs between two rollouts, or -1.
  function findDivergence(a, b) {
    const length = Math.min(a.token_ids.length, b.token_ids.length);
    for (let i = 0; i < length; i++) {
      if (a.token_ids[i] !== b.token_ids[i]) return i;
    }
    return a.token_ids.length === b.token_ids.length ? -1 : length;
  }

  function describeTokens({ steps, tokens }) {
    if (tokens) {
      return `Tokens first differ at step ${tokens.step}, rollout ${tokens.number}, token ${tokens.token}.`;
    }
    if (!steps) return "The runs have no recorded step in common.";
    return `All tokens are equal in the ${steps} steps that both have recorded.`;
  }

  function describeMetrics({ metrics }) {
    if (metrics) return `Metrics first differ at step ${metrics.step}: ${metrics.names.join(", ")}.`;
    return "All metrics that both have are equal; times, speed and memory are not compared.";
  }

  // Selects the first rollout that differs, or the first one of the last step.
  function selectDivergence(divergence) {
    const { step, number } = divergence.tokens || { step: megarl.overview.runs[0].steps.at(-1) ?? 1, number: 0 };
    state.step = step;
    state.number = number;
  }

  // Draws the selected rollout of both runs into `panes`.
  async function drawRollouts(panes, message) {
    message.textContent = "";
    const { otherIndex, step, number } = state;
    const [left, right] = panes;
    const [a, b] = await Promise.all([
      megarl.showRollout(left, 0, step, number),
      megarl.showRollout(right, otherIndex, step, number),
    ]);
    if (!a || !b) return;
    const token = findDivergence(a, b);
    if (token < 0) {
      message.textContent = "Both rollouts have the same tokens.";
      return;
    }
    message.textContent = `The rollouts first differ at token ${token}.`;
    megarl.drawRollout(left, a, token);
    megarl.drawRollout(right, b, token);
  }

  megarl.views.Compare = {
    async draw(root) {
      const { runs, divergences } = megarl.overview;
      const divergence = divergences[state.otherIndex - 1]; // of the first run from each other one
      if (state.step === null) selectDivergence(divergence);
      const other = runs[state.otherIndex];
      const panes = [el("div"), el("div")];
      const message = el("p", { class: "muted" });

      const createField = (name) => {
        const change = (event) => {
          state[name] = +event.target.value;
          drawRollouts(panes, message);
        };
        return el("input", { type: "number", min: 0, value: state[name], onchange: change });
      };
      const selectRun = (event) => {
        state.otherIndex = +event.target.value;
        state.step = null;
        this.draw(root);
      };
      const options = runs.slice(1).map((run, i) => {
        const index = i + 1;
        return el("option", { value: index, selected: index === state.otherIndex }, run.name);
      });

      const names = el("strong", {}, `${runs[0].name} and ${other.name}: `);
      const summary = `${describeTokens(divergence)} ${describeMetrics(divergence)}`;
      const toolbar = el(
        "div",
        { class: "toolbar" },
        el("label", {}, "compare with ", el("select", { onchange: selectRun }, ...options)),
        el("label", {}, "step ", createField("step")),
        el("label", {}, "rollout ", createField("number")),
        message,
      );
      const cards = [runs[0], other].map((run, i) =>
        el("section", { class: "card" }, el("strong", {}, run.name), panes[i]),
      );
      root.replaceChildren(el("p", {}, names, summary), toolbar, el("div", { class: "split equal" }, ...cards));
      await drawRollouts(panes, message);
    },
  };
}
