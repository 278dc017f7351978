"use strict";
// One rollout: its fields, turns, and tokens colored by the selected mode.
{
  const MAX_TOKENS = 20000; // drawn at once
  const MASKED = "prompt or tool result"; // tokens that the policy did not write
  const BLUE = "59,130,246";
  const GREEN = "22,163,74";
  const ORANGE = "217,119,6";
  const PINK = "219,39,119";
  const RED = "220,38,38";
  const TEAL = "13,148,136";

  const isMissing = (value) => value === null || value === undefined;
  const subtract = (a, b) => (isMissing(a) || isMissing(b) ? null : a - b);

  // Subtracts two lists of per-token values; null if one was not recorded.
  function subtractEach(a, b) {
    return a && b ? a.map((value, i) => subtract(value, b[i])) : null;
  }

  function getRoutingChanges(rollout) {
    const changes = subtractEach(rollout.trainer_logprobs, rollout.unreplayed_logprobs);
    return changes && changes.map((change) => (change === null ? null : Math.abs(change)));
  }

  // Each mode has `getValues`, which returns a value per token, or null if they were not recorded. Modes with `getFill`
  // color each value independently. The others color the policy's tokens with `getHue`, the larger the value the
  // stronger. Their scale ends at the rollout's largest value, however small; that of log-probs is within 3 and 8.
  const getLogprobEnd = (largest) => Math.max(3, Math.min(largest, 8));
  const getSignHue = (value) => (value < 0 ? RED : GREEN);
  const MODES = {
    mask: {
      label: "mask",
      description: "blue: written by the policy and trained on",
      getValues: (rollout) => rollout.isAction,
      getFill: (isAction) => (isAction ? `rgba(${BLUE},.22)` : ""),
    },
    advantage: {
      label: "advantage",
      description: "red below 0, green above",
      getValues: (rollout) => rollout.advantages,
      getHue: getSignHue,
    },
    logprob: {
      label: "log-prob, engine",
      description: "the stronger the color, the less likely the token",
      getValues: (rollout) => rollout.logprobs,
      getHue: () => ORANGE,
      getScaleEnd: getLogprobEnd,
    },
    trainer: {
      label: "log-prob, trainer",
      description: "the stronger the color, the less likely the token",
      getValues: (rollout) => rollout.trainer_logprobs,
      getHue: () => ORANGE,
      getScaleEnd: getLogprobEnd,
    },
    ratio: {
      label: "ratio",
      description: "log of the trainer's probability over the engine's: red if the ratio is below 1, green if above",
      getValues: (rollout) => subtractEach(rollout.trainer_logprobs, rollout.logprobs),
      getHue: getSignHue,
    },
    version: {
      label: "weight version",
      description: "one color per weight version",
      getValues: ({ versions }) => (versions.some((version) => version >= 0) ? versions : null),
      getFill: (version) => (version >= 0 ? getColor(version) + "55" : ""),
    },
    cache: {
      label: "cache",
      description: "green: in the engine's prefix cache at the first request after it; orange: computed anew",
      getValues: ({ isCached }) => (isCached.some((value) => value !== null) ? isCached : null),
      getFill: (isCached) => {
        if (isCached === null) return "";
        return isCached ? `rgba(${TEAL},.30)` : `rgba(${ORANGE},.22)`;
      },
    },
    routing: {
      label: "routing",
      description: "change of the trainer's log-prob when it chooses experts itself instead of replaying the engine's",
      getValues: getRoutingChanges,
      getHue: () => PINK,
    },
  };
  let mode = "mask";

  // Returns for each token whether the engine had it in its cache when the policy's next turn was requested; null if
  // that was not recorded, or there was no further request.
  function findCachedTokens(turns) {
    const isCached = [];
    let position = 0;
    for (const turn of turns) {
      if (turn.is_action) {
        const isRecorded = !isMissing(turn.cached_tokens);
        while (isCached.length < position) isCached.push(isRecorded ? isCached.length < turn.cached_tokens : null);
      }
      position += turn.num_tokens;
    }
    while (isCached.length < position) isCached.push(null);
    return isCached;
  }

  // Returns weight versions as [version, tokens] in order; a turn during which weights were synchronized has several.
  const getVersionSpans = (turn) =>
    turn.version_spans.length ? turn.version_spans : [[turn.weight_version, turn.num_tokens]];

  // Adds what the turns say about each token: isAction, versions (-1 if none) and isCached.
  function addTokenColumns(rollout) {
    if (rollout.isAction) return;
    rollout.isAction = [];
    rollout.versions = [];
    rollout.isCached = findCachedTokens(rollout.turns);
    for (const turn of rollout.turns) {
      for (const [version, numTokens] of getVersionSpans(turn)) {
        for (let i = 0; i < numTokens; i++) {
          rollout.isAction.push(turn.is_action);
          rollout.versions.push(turn.is_action ? (version ?? -1) : -1);
        }
      }
    }
  }

  // Returns the value of the strongest color; null for modes without a scale.
  function getScaleEnd(rollout, values) {
    const { getFill, getScaleEnd: limit } = MODES[mode];
    if (getFill) return null;
    const largest = values.reduce(
      (maximum, value, i) => (rollout.isAction[i] && value !== null ? Math.max(maximum, Math.abs(value)) : maximum),
      0,
    );
    return limit ? limit(largest) : largest;
  }

  function describeMode(rollout) {
    const { description, getValues } = MODES[mode];
    const values = getValues(rollout);
    if (!values) return "not recorded";
    const end = getScaleEnd(rollout, values);
    if (end === null) return description;
    return end ? `${description}; strongest at ${end.toPrecision(2)}` : `${description}; 0 at every token`;
  }

  // Returns a function from a token's index to its color, "" for none.
  function createColorizer(rollout) {
    const { getValues, getFill, getHue } = MODES[mode];
    const values = getValues(rollout);
    if (!values) return () => "";
    if (getFill) return (i) => getFill(values[i]);
    const end = getScaleEnd(rollout, values);
    return (i) => {
      if (!rollout.isAction[i] || !values[i] || !end) return "";
      const strength = Math.min(1, Math.abs(values[i]) / end);
      return `rgba(${getHue(values[i])},${(0.06 + 0.6 * strength).toFixed(3)})`;
    };
  }

  function showControlCharacters(text) {
    return text
      .replace(/\r/g, "␍")
      .replace(/\n/g, "⏎\n")
      .replace(/\t/g, "⇥\t")
      .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g, "�");
  }

  function describeToken(rollout, i) {
    const parts = [`token ${i}, id ${rollout.token_ids[i]}, ${JSON.stringify(rollout.token_texts[i])}`];
    if (!rollout.isAction[i]) return [...parts, `${MASKED}, not trained on`].join("  ");
    const { logprobs, trainer_logprobs: trainer, unreplayed_logprobs: unreplayed, advantages } = rollout;
    parts.push(`log-prob: engine ${formatNumber(logprobs && logprobs[i])}`);
    if (trainer) {
      const difference = subtract(trainer[i], logprobs && logprobs[i]);
      const ratio = difference === null ? null : Math.exp(difference);
      parts.push(`trainer ${formatNumber(trainer[i])}`);
      parts.push(`ratio ${formatNumber(ratio)}, difference ${formatSmall(difference)}`);
    }
    if (unreplayed) {
      const difference = subtract(trainer && trainer[i], unreplayed[i]);
      parts.push(`without routing replay ${formatNumber(unreplayed[i])}, difference ${formatSmall(difference)}`);
    }
    if (advantages) parts.push(`advantage ${formatNumber(advantages[i])}`);
    parts.push(`weight version ${rollout.versions[i]}`);
    return parts.join("  ");
  }

  function describeVersions(turn) {
    if (!turn.version_spans.length) return `weight version ${turn.weight_version ?? "?"}`;
    const spans = turn.version_spans.map(([version, numTokens]) => `${version} (${numTokens} tokens)`);
    return `weight versions ${spans.join(", ")}`;
  }

  // position: number of tokens before the turn.
  function describeTurn(turn, index, position) {
    const parts = [];
    if (turn.is_action) {
      parts.push("policy", `${turn.num_tokens} tokens`, describeVersions(turn));
      if (!isMissing(turn.cached_tokens)) parts.push(`${turn.cached_tokens} of ${position} prefix tokens cached`);
    } else {
      parts.push(MASKED, "not trained on", `${turn.num_tokens} tokens`);
    }
    if (turn.reward) parts.push(`reward ${formatNumber(turn.reward)}`);
    return `turn ${index}: ${parts.join(", ")}`;
  }

  function describePrompt(rollout) {
    const source = rollout.data_source ? ` (${rollout.data_source})` : "";
    const episode = rollout.episode >= 0 ? `, episode ${rollout.episode}` : "";
    return `${rollout.id ?? "?"}${source}, group ${rollout.group}${episode}`;
  }

  function describeReward(rollout) {
    const unscored = Object.entries(rollout.unscored).map(([part, reason]) => `${part}: ${reason}`);
    if (unscored.length) return `none: ${unscored.join("; ")}`;
    const parts = Object.entries(rollout.reward_parts).map(([part, value]) => `${part} ${formatNumber(value)}`);
    return formatNumber(rollout.reward) + (parts.length > 1 ? ` = ${parts.join(", ")}` : "");
  }

  function createFields(rollout) {
    const { status, failure, ground_truth: groundTruth, branch, forks, drift, greedy } = rollout;
    const fields = [
      ["prompt", describePrompt(rollout)],
      ["reward", describeReward(rollout)],
      ["advantage", formatNumber(rollout.advantage)],
      ["status", failure ? `${status}: ${failure}` : status],
    ];
    if (!isMissing(groundTruth) && groundTruth !== "null") fields.push(["ground truth", groundTruth]); // it is JSON
    if (rollout.tool_calls) fields.push(["tool calls", `${rollout.tool_calls}, ${rollout.tool_errors} failed`]);
    if (!isMissing(branch)) fields.push(["branch", `${branch}, ${forks} forks${drift ? ", drifted" : ""}`]);
    fields.push(greedy ? ["sampling", "greedy"] : ["seed", String(rollout.seed)]);
    const items = fields.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    return el("dl", { class: "fields" }, ...items);
  }

  function createTurn(isAction, title, ...content) {
    const className = isAction ? "turn policy" : "turn";
    return el("div", { class: className }, el("h4", {}, title), el("div", { class: "tokens" }, ...content));
  }

  // Returns the conversation as a chat; null if its messages are not recorded.
  function createChat(messages) {
    if (!messages.length) return null;
    const bubbles = messages.map(({ role, text }) => {
      const className = role === "assistant" ? "message policy" : "message";
      return el("div", { class: className }, el("h4", {}, role), el("div", { class: "text" }, text || "–"));
    });
    return el("details", { class: "chat", open: true }, el("summary", { class: "muted" }, "conversation"), ...bubbles);
  }

  // Returns the turns with all tokens up to MAX_TOKENS, each colored. divergence: index of the token to mark, or -1.
  function createTurns(rollout, divergence) {
    const getTokenColor = createColorizer(rollout);
    let position = 0;
    return rollout.turns.map((turn, index) => {
      const begin = position;
      const end = begin + turn.num_tokens;
      const content = [];
      for (; position < Math.min(end, MAX_TOKENS); position++) {
        const span = el("span", {}, showControlCharacters(rollout.token_texts[position]) || "·");
        const color = getTokenColor(position);
        span.dataset.index = position;
        if (color) span.style.backgroundColor = color;
        if (position === divergence) span.className = "divergence";
        content.push(span);
      }
      if (position < end) content.push(el("em", { class: "muted" }, ` … and ${end - position} more tokens`));
      position = end;
      return createTurn(turn.is_action, describeTurn(turn, index, begin), ...content);
    });
  }

  function createModeButtons(rollout, onChange) {
    const buttons = Object.entries(MODES).map(([name, { label, getValues }]) => {
      const select = () => {
        mode = name;
        onChange();
      };
      const button = el("button", { onclick: select }, label);
      button.dataset.mode = name;
      if (!getValues(rollout)) {
        button.disabled = true;
        button.title = "not recorded";
      }
      return button;
    });
    return el("div", { class: "modes" }, ...buttons);
  }

  // divergence: index of the first token that differs from another rollout, or -1.
  megarl.drawRollout = (root, rollout, divergence = -1) => {
    addTokenColumns(rollout);
    const description = el("span", { class: "muted" });
    const turns = el("div");
    const hoverDetails = el("div", { class: "hover-details" }, "Hover over a token.");
    const draw = () => {
      turns.replaceChildren(...createTurns(rollout, divergence));
      const marked = turns.querySelector(".divergence");
      if (marked) setTimeout(() => marked.scrollIntoView({ block: "center" }));
      for (const button of buttons.children) button.classList.toggle("selected", button.dataset.mode === mode);
      description.textContent = describeMode(rollout);
    };
    const buttons = createModeButtons(rollout, draw);
    turns.onmouseover = ({ target }) => {
      if (target.dataset.index) hoverDetails.textContent = describeToken(rollout, +target.dataset.index);
    };
    root.replaceChildren(
      el("h3", {}, `step ${rollout.step}, rollout ${rollout.number}`),
      createFields(rollout),
      ...[createChat(rollout.messages), buttons, description, turns, hoverDetails].filter(Boolean),
    );
    draw();
  };

  // Loads and draws a rollout. Returns it, or null if it cannot be shown or another one was selected meanwhile.
  megarl.showRollout = async (root, runIndex, step, number, prefix = "") => {
    const request = {};
    root.request = request;
    const isOutdated = () => root.request !== request;
    try {
      const rollout = await megarl.loadRollout(runIndex, step, number, prefix);
      if (isOutdated()) return null;
      if (!rollout) throw new Error("this rollout cannot be read; see the notes at the top");
      megarl.drawRollout(root, rollout);
      return rollout;
    } catch (error) {
      if (!isOutdated()) {
        root.replaceChildren(el("h3", {}, `step ${step}, rollout ${number}`), createHint(error.message));
      }
      return null;
    }
  };
}
