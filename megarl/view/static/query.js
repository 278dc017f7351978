"use strict";
// Parses conditions such as `reward<0.5 and turns>2`, like megarl/view/query.py, to predicates on row indices.
megarl.condition = (text, table) => {
  const tokens = [];
  const pattern = /\s*(?:(<=|>=|==|!=|[<>=~()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))/y;
  const trimmed = text.trimEnd();
  if (trimmed.length > 1000) throw new Error("a condition has at most 1000 characters");
  for (let at = 0; at < trimmed.length; at = pattern.lastIndex) {
    pattern.lastIndex = at;
    const match = pattern.exec(trimmed);
    if (!match) throw new Error(`cannot read ${trimmed.slice(at, at + 30).trim()}`);
    const [, sign, double, single, word] = match;
    tokens.push(sign ? ["sign", sign] : word !== undefined ? ["word", word] : ["text", double ?? single]);
  }
  let at = 0;
  const takes = (word) => {
    if (at < tokens.length && tokens[at][0] !== "text" && tokens[at][1] === word) return ++at;
    return 0;
  };
  const next = (wanted) => {
    if (at >= tokens.length) throw new Error(`expected ${wanted}, found the end`);
    return tokens[at++];
  };
  const either = (depth) => {
    const parts = [both(depth)];
    while (takes("or")) parts.push(both(depth));
    return (row) => parts.some((part) => part(row));
  };
  const both = (depth) => {
    const parts = [one(depth)];
    while (takes("and")) parts.push(one(depth));
    return (row) => parts.every((part) => part(row));
  };
  const one = (depth) => {
    if (depth > 40) throw new Error("more than 40 parts within each other");
    if (takes("not")) {
      const inner = one(depth + 1);
      return (row) => !inner(row);
    }
    if (takes("(")) {
      const inner = either(depth + 1);
      if (!takes(")")) throw new Error("a closing parenthesis is missing");
      return inner;
    }
    return comparison();
  };
  const comparison = () => {
    const [kind, name] = next("a column");
    const values = table.columns[name];
    if (kind !== "word" || !Object.hasOwn(table.columns, name)) throw new Error(`there is no column ${name}; there are ${Object.keys(table.columns).join(", ")}`);
    const [isSign, sign] = next("a sign such as <");
    if (isSign !== "sign" || "()".includes(sign)) throw new Error(`expected a sign such as <, found ${sign}`);
    const [what, wanted] = next("a value");
    if (what === "sign") throw new Error(`expected a value, found ${wanted}`);
    const texts = Object.hasOwn(table.texts, name) ? table.texts[name] : null;
    if (texts) {
      if (!["=", "==", "!=", "~"].includes(sign)) throw new Error(`${name} is text, which is compared by =, != or ~`);
      const fits = texts.map((text) => (sign === "~" ? text.includes(wanted) : (text === wanted) === (sign !== "!=")));
      return (row) => fits[values[row]];
    }
    const number = Number(wanted);
    if (sign === "~") throw new Error(`${name} is a number, which ~ does not fit`);
    if (wanted === "" || Number.isNaN(number)) throw new Error(`${name} is a number, and ${wanted} is none`);
    return {
      "<": (row) => values[row] < number, "<=": (row) => values[row] <= number, ">": (row) => values[row] > number,
      ">=": (row) => values[row] >= number, "=": (row) => values[row] === number, "==": (row) => values[row] === number,
      "!=": (row) => values[row] !== number,
    }[sign];
  };
  if (!tokens.length) return null;
  const condition = either(0);
  if (at < tokens.length) throw new Error(`expected and, or, or the end, found ${tokens[at][1]}`);
  return condition;
};
