// JSON for people to read: indented and coloured, its numbers and strings left exactly as they were written.

import { element } from "./dom.js";

const TOKENS = /"(?:\\.|[^"\\])*"|[{}[\],:]|[^\s{}[\],:"]+/g;

/** JSON with line breaks and indentation; null for a text that is not JSON. */
export function indented(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const tokens = text.match(TOKENS);
  let depth = 0;
  let result = "";
  const line = () => "\n" + "  ".repeat(depth);
  tokens.forEach((token, index) => {
    const next = tokens[index + 1];
    if (token === "{" || token === "[") {
      const closes = next === "}" || next === "]";
      if (!closes) depth += 1;
      result += closes ? token : token + line();
    } else if (token === "}" || token === "]") {
      const opened = tokens[index - 1] === "{" || tokens[index - 1] === "[";
      if (!opened) depth -= 1;
      result += opened ? token : line() + token;
    } else if (token === ",") {
      result += token + line();
    } else {
      result += token === ":" ? ": " : token;
    }
  });
  return result;
}

/** Shows JSON in `target`, in place of what it holds; a text that is not JSON as it is. */
export function showJson(target, text) {
  const whole = indented(text);
  if (whole === null) {
    target.textContent = text;
    return;
  }
  const parts = [];
  let end = 0;
  for (const match of whole.matchAll(TOKENS)) {
    parts.push(whole.slice(end, match.index), coloured(match[0], whole[match.index + match[0].length]));
    end = match.index + match[0].length;
  }
  target.replaceChildren(...parts, whole.slice(end));
}

function coloured(token, after) {
  if (token.startsWith('"')) return element("span", { class: after === ":" ? "key" : "string" }, token);
  return /^[{}[\],:]$/.test(token) ? token : element("span", { class: "literal" }, token);
}
