// What the conversation looks like: a turn of the user, and one of the model while it comes and when it is done.

import { button, copyButton, element } from "./dom.js";
import { showJson } from "./json.js";
import { Prose } from "./prose.js";

const NEAR = 60; // pixels from the end at which the log follows what is added

/** A turn of the user. */
export function userTurn(text) {
  return element("article", { class: "user", "aria-label": "You" }, element("p", { dir: "auto" }, text));
}

/** An error without an answer. */
export function errorNote(message) {
  return element("p", { class: "error", role: "alert" }, message);
}

/** Calls `change`, and keeps the end of `log` in sight if it was. */
export function following(log, change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

/** A turn of the model. */
export class AnswerView {
  #wait = element("p", { class: "waiting", "aria-hidden": "true" }, "…");
  #prose = null;
  #json;
  #reasoning = null;
  #calls = [];
  #results = null;

  /** json: whether the answer is JSON. */
  constructor(answer, json) {
    this.answer = answer;
    this.#json = json;
    this.node = element("article", { class: "model", "aria-label": "Model", "aria-busy": "true" });
    this.node.append(this.#wait);
  }

  /** Shows a piece of the answer; see Answer.add. */
  add(piece) {
    this.#wait.remove();
    if (piece.reasoning) this.#addReasoning(piece.reasoning);
    else if (piece.content) this.#addContent(piece.content);
    else this.#addCall(piece);
  }

  /** Shows that nothing more comes. error: a sentence, or null. timing: {first, rate}, or null. */
  end({ stopped, error, timing }) {
    const { answer } = this;
    this.#wait.remove();
    this.#prose?.end?.();
    this.#closeReasoning();
    if (this.#json && this.#prose) showJson(this.#prose.target, answer.content);
    for (const [index, call] of this.#calls.entries()) if (call) showJson(call.code, answer.calls[index].arguments);
    if (answer.parseError) this.node.append(note(`The server could not read all of this answer: ${answer.parseError}.`));
    if (answer.empty && !error) this.node.append(note("The answer is empty."));
    if (error) this.node.append(errorNote(error));
    this.node.append(this.#footer(stopped, timing));
    this.node.setAttribute("aria-busy", "false");
  }

  /** Asks for the results of the calls; `send` is called when all are entered. */
  askResults(send) {
    const fields = this.#calls.map((call, index) => {
      const name = this.answer.calls[index].name;
      const input = element("textarea", { rows: "2", "aria-label": `Result of ${name}`, class: "code" });
      call.node.append(element("label", { class: "result" }, "Result", input));
      return input;
    });
    const submit = () => {
      fields.forEach((input, index) => (this.answer.calls[index].result = input.value));
      send();
    };
    for (const [index, input] of fields.entries()) {
      input.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        if (index < fields.length - 1) fields[index + 1].focus();
        else submit();
      });
    }
    const sendButton = button(fields.length > 1 ? "Send results" : "Send result", submit, { class: "primary" });
    this.#results = { fields, node: element("div", { class: "results" }, sendButton) };
    this.node.querySelector("footer").before(this.#results.node);
    return fields[0];
  }

  /** Lets results be changed, or no more. */
  setResultsOpen(open) {
    for (const input of this.#results.fields) input.readOnly = !open;
    this.#results.node.hidden = !open;
  }

  /** The first field for a result, if results are missing. */
  get firstResult() {
    return this.#results && !this.#results.node.hidden ? this.#results.fields[0] : null;
  }

  /** Offers to answer again, until the conversation goes on. */
  offerAgain(again) {
    this.againButton = button("Answer again", again, { class: "link" });
    this.node.querySelector("footer").append(this.againButton);
  }

  withdrawAgain() {
    this.againButton?.remove();
  }

  #addReasoning(text) {
    if (!this.#reasoning) {
      const said = document.createTextNode("");
      const node = element(
        "details",
        { class: "reasoning", open: true },
        element("summary", {}, "Reasoning"),
        element("p", { dir: "auto" }, said),
      );
      this.#reasoning = { node, said, closes: true };
      node.querySelector("summary").addEventListener("click", () => (this.#reasoning.closes = false));
      this.node.append(node);
    }
    this.#reasoning.said.appendData(this.#reasoning.said.data ? text : text.trimStart());
  }

  /** Folds the reasoning when something else comes, unless the reader has folded or opened it. */
  #closeReasoning() {
    if (this.#reasoning?.closes) this.#reasoning.node.open = false;
    if (this.#reasoning) this.#reasoning.closes = false;
  }

  #addContent(text) {
    this.#closeReasoning();
    if (!this.#prose) {
      const target = this.#json ? element("code") : element("div", { class: "prose" });
      this.node.append(this.#json ? element("pre", { class: "json", tabindex: "0" }, target) : target);
      this.#prose = this.#json ? { target, add: (more) => target.append(more) } : new Prose(target);
    }
    this.#prose.add(text);
  }

  #addCall(piece) {
    this.#closeReasoning();
    let call = this.#calls[piece.call];
    if (!call) {
      const name = this.answer.calls[piece.call].name;
      const code = element("code");
      const node = element(
        "section",
        { class: "call", "aria-label": `Call of ${name}` },
        element("h2", {}, element("span", {}, "calls "), name),
        element("pre", { class: "json", tabindex: "0" }, code),
      );
      call = this.#calls[piece.call] = { node, code };
      this.node.append(node);
    }
    call.code.append(piece.arguments);
  }

  #footer(stopped, timing) {
    const { usage, finishReason, content } = this.answer;
    const facts = [];
    if (stopped) facts.push("stopped");
    if (finishReason === "length") facts.push("cut short by max tokens or the context");
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      facts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}`);
      const reasoning = usage.completion_tokens_details?.reasoning_tokens;
      facts.push(`${usage.completion_tokens} out${reasoning ? ` (${reasoning} reasoning)` : ""}`);
    }
    if (timing?.rate) facts.push(`${timing.rate < 10 ? timing.rate.toFixed(1) : Math.round(timing.rate)} tokens/s`);
    if (timing) facts.push(`first after ${Math.round(timing.first)} ms`);
    const copy = content ? copyButton(() => content) : null;
    return element("footer", {}, element("span", {}, facts.join(" · ")), ...(copy ? [copy] : []));
  }
}

function note(text) {
  return element("p", { class: "note" }, text);
}
