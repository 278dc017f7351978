"use strict";
// Parses conditions such as `reward<0.5 and turns>2`, like megarl/view/query.py, to predicates on row indices.
{
  const MAX_CHARS = 1000;
  const MAX_DEPTH = 40;
  const TOKEN_PATTERNS = [
    /(?<operator><=|>=|==|!=|[<>=~()])/,
    /"(?<double>[^"]*)"/,
    /'(?<single>[^']*)'/,
    /(?<word>[^\s<>=!~()"']+)/,
  ];
  const TOKEN = new RegExp(`\\s*(?:${TOKEN_PATTERNS.map((pattern) => pattern.source).join("|")})`, "y");
  const TEXT_OPERATORS = ["=", "==", "!=", "~"];

  // Returns [{kind, text}], where kind is operator (with parentheses), word or quoted.
  function tokenize(text) {
    const tokens = [];
    let position = 0;
    while (position < text.length) {
      TOKEN.lastIndex = position;
      const match = TOKEN.exec(text);
      if (!match) throw new Error(`cannot read ${text.slice(position, position + 30).trim()}`);
      const { operator, double, single, word } = match.groups;
      if (operator) tokens.push({ kind: "operator", text: operator });
      else if (word !== undefined) tokens.push({ kind: "word", text: word });
      else tokens.push({ kind: "quoted", text: double ?? single });
      position = TOKEN.lastIndex;
    }
    return tokens;
  }

  function compareTexts(name, operator, text, column, texts) {
    if (!TEXT_OPERATORS.includes(operator)) throw new Error(`${name} is text, which is compared by =, != or ~`);
    const matches = texts.map((candidate) => {
      if (operator === "~") return candidate.includes(text);
      return (candidate === text) === (operator !== "!=");
    });
    return (row) => matches[column[row]];
  }

  function compareNumbers(name, operator, text, column) {
    const number = Number(text);
    if (operator === "~") throw new Error(`${name} is a number, which ~ does not fit`);
    if (text === "" || Number.isNaN(number)) throw new Error(`${name} is a number, and "${text}" is not`);
    const predicates = {
      "<": (row) => column[row] < number,
      "<=": (row) => column[row] <= number,
      ">": (row) => column[row] > number,
      ">=": (row) => column[row] >= number,
      "=": (row) => column[row] === number,
      "==": (row) => column[row] === number,
      "!=": (row) => column[row] !== number,
    };
    return predicates[operator];
  }

  class Parser {
    constructor(tokens, table) {
      this.tokens = tokens;
      this.table = table;
      this.position = 0;
    }

    parse() {
      const predicate = this.parseOr(0);
      if (this.position < this.tokens.length) {
        throw new Error(`expected and, or, or the end, found ${this.tokens[this.position].text}`);
      }
      return predicate;
    }

    parseOr(depth) {
      const parts = [this.parseAnd(depth)];
      while (this.accept("or")) parts.push(this.parseAnd(depth));
      return (row) => parts.some((part) => part(row));
    }

    parseAnd(depth) {
      const parts = [this.parseTerm(depth)];
      while (this.accept("and")) parts.push(this.parseTerm(depth));
      return (row) => parts.every((part) => part(row));
    }

    parseTerm(depth) {
      if (depth > MAX_DEPTH) throw new Error(`more than ${MAX_DEPTH} levels of nesting`);
      if (this.accept("not")) {
        const inner = this.parseTerm(depth + 1);
        return (row) => !inner(row);
      }
      if (this.accept("(")) {
        const inner = this.parseOr(depth + 1);
        if (!this.accept(")")) throw new Error("a closing parenthesis is missing");
        return inner;
      }
      return this.parseComparison();
    }

    parseComparison() {
      const { columns, texts } = this.table;
      const { kind, text: name } = this.next("a column");
      if (kind !== "word" || !Object.hasOwn(columns, name)) {
        throw new Error(`there is no column ${name}; the columns are ${Object.keys(columns).join(", ")}`);
      }
      const operator = this.next("an operator such as <");
      if (operator.kind !== "operator" || "()".includes(operator.text)) {
        throw new Error(`expected an operator such as <, found ${operator.text}`);
      }
      const value = this.next("a value");
      if (value.kind === "operator") throw new Error(`expected a value, found ${value.text}`);
      if (Object.hasOwn(texts, name)) {
        return compareTexts(name, operator.text, value.text, columns[name], texts[name]);
      }
      return compareNumbers(name, operator.text, value.text, columns[name]);
    }

    accept(text) {
      const token = this.tokens[this.position];
      const isNext = token !== undefined && token.kind !== "quoted" && token.text === text;
      if (isNext) this.position++;
      return isNext;
    }

    next(expected) {
      if (this.position >= this.tokens.length) throw new Error(`expected ${expected}, found the end`);
      return this.tokens[this.position++];
    }
  }

  // Returns a predicate on the rows of a table, or null for an empty condition. Throws an Error if it is invalid.
  megarl.parseCondition = (text, table) => {
    const trimmed = text.trimEnd();
    if (trimmed.length > MAX_CHARS) throw new Error(`a condition has at most ${MAX_CHARS} characters`);
    const tokens = tokenize(trimmed);
    return tokens.length ? new Parser(tokens, table).parse() : null;
  };
}
