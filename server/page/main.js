// Joins the parts: sends what is written, shows the answer while it comes, stops it, and goes on after tool calls.

import { ApiError, get, streamChat } from "./api.js";
import { Answer, Conversation } from "./conversation.js";
import * as settings from "./settings.js";
import { AnswerView, errorNote, following, userTurn } from "./view.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const message = byId("message");
const narrow = matchMedia("(max-width: 60rem)");

let conversation = new Conversation();
let model = null;
/** Stops the answer that is coming; null: none is. */
let running = null;
/** The view of the last turn, if it is the model's. */
let lastView = null;

function say(text) {
  byId("status").textContent = text;
}

function show(node) {
  byId("empty").hidden = true;
  following(log, () => log.append(node));
}

function showSettings(open) {
  document.body.classList.toggle("with-settings", open);
  byId("settings-button").setAttribute("aria-expanded", String(open));
}

function clearErrors() {
  for (const node of document.querySelectorAll("#log > .error, #settings .error")) node.remove();
}

/** Shows an error that belongs to no answer, and goes to the setting that mends it. */
function complain(error) {
  clearErrors();
  const field = error.status === 401 ? byId("key") : error.field;
  if (!field) {
    show(errorNote(error.message));
    return;
  }
  showSettings(true);
  if (!narrow.matches) show(errorNote(error.message));
  else if (field.ariaInvalid !== "true") field.after(errorNote(error.message)); // the settings hide the conversation
  field.focus();
}

/** Asks the server what it serves. */
async function connect() {
  try {
    const [served] = (await get("v1/models", settings.apiKey())).data;
    model = served.id;
    byId("model").textContent = document.title = model;
    byId("context").textContent = `context of ${served.max_model_len} tokens`;
    clearErrors();
    const info = await get("tokenizer_info", settings.apiKey());
    settings.offerReasoning(JSON.stringify(info.chat_template ?? ""));
  } catch (error) {
    complain(error);
  }
}

/** Sends what is written. */
async function send() {
  const text = message.value;
  if (!text.trim() || running) return;
  if (lastView?.firstResult) {
    complain(new ApiError("The model waits for the result of its call: enter it first."));
    lastView.firstResult.focus();
    return;
  }
  const turn = userTurn(text);
  conversation.turns.push(text);
  const begun = await answer(() => {
    message.value = "";
    show(turn);
    log.scrollTop = log.scrollHeight;
  });
  if (begun) return;
  conversation.turns.pop(); // nothing came: the message goes back to where it can be changed
  turn.remove();
  if (!message.value) message.value = text;
  if (lastView) offerAgain(lastView);
}

/**
 * Has the model answer the conversation. False: nothing came, and the reader was told why. `started` is called when the
 * request is sent.
 */
async function answer(started) {
  const asked = conversation;
  let body;
  try {
    if (!model) await connect();
    if (!model) return false;
    const messages = asked.messages(settings.systemMessage());
    body = { model, messages, stream: true, stream_options: { include_usage: true }, ...settings.parameters() };
  } catch (error) {
    complain(error);
    return false;
  }
  clearErrors();
  started();
  const found = new Answer();
  const view = new AnswerView(found, settings.wantsJson());
  lastView?.withdrawAgain();
  show(view.node);
  setRunning(new AbortController());
  say("The model answers.");
  const clock = new Clock();
  let failure = null;
  try {
    for await (const chunk of streamChat(body, settings.apiKey(), running.signal)) {
      const pieces = found.add(chunk);
      if (!pieces.length) continue;
      clock.tick();
      following(log, () => pieces.forEach((piece) => view.add(piece)));
    }
  } catch (error) {
    failure = error;
  }
  setRunning(null);
  if (conversation !== asked) return true; // another has been begun meanwhile
  const stopped = failure?.name === "AbortError";
  if (found.empty && failure) {
    view.node.remove();
    if (stopped) say("Stopped.");
    else complain(failure);
    if (failure.status === 404) model = null; // another model may be served by now
    return false;
  }
  asked.turns.push(found);
  lastView = view;
  following(log, () => {
    view.end({ stopped, error: stopped ? null : failure?.message, timing: clock.timing(found.usage) });
    if (failure) found.calls = []; // they may not be whole
    offerAgain(view);
    if (found.waits) askResults(view);
  });
  say(stopped ? "Stopped." : found.waits ? "The model calls a tool. Enter the result." : "The answer is complete.");
  return true;
}

function offerAgain(view) {
  view.withdrawAgain();
  view.offerAgain(async () => {
    if (running) return;
    conversation.turns.pop();
    lastView = null;
    if (await answer(() => view.node.remove())) return;
    conversation.turns.push(view.answer);
    lastView = view;
    if (!view.node.isConnected) show(view.node);
    offerAgain(view);
  });
}

function askResults(view) {
  const first = view.askResults(async () => {
    if (running) return;
    view.setResultsOpen(false);
    if (await answer(() => message.focus())) return;
    view.answer.calls.forEach((call) => (call.result = null));
    view.setResultsOpen(true);
    offerAgain(view);
  });
  if (document.activeElement === message && !message.value) first.focus();
}

function setRunning(controller) {
  const focused = document.activeElement;
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  if (controller && focused === byId("send")) byId("stop").focus();
  if (!controller && (focused === byId("stop") || focused === document.body)) message.focus();
}

function stop() {
  running?.abort();
}

function reset() {
  stop();
  conversation = new Conversation();
  lastView = null;
  for (const node of log.querySelectorAll(":scope > article, :scope > .error")) node.remove();
  byId("empty").hidden = false;
  message.focus();
}

/** Measures an answer: the time to its first piece, and tokens per second after that. */
class Clock {
  #sent = performance.now();
  #first = 0;
  #last = 0;

  tick() {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  timing(usage) {
    if (!this.#first) return null;
    const seconds = (this.#last - this.#first) / 1000;
    const tokens = (usage?.completion_tokens ?? 0) - 1;
    return { first: this.#first - this.#sent, rate: tokens > 0 && seconds > 0 ? tokens / seconds : null };
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", reset);
byId("settings-button").addEventListener("click", () => showSettings(!document.body.classList.contains("with-settings")));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) {
    stop();
  } else if (narrow.matches && document.body.classList.contains("with-settings")) {
    showSettings(false);
    byId("settings-button").focus();
  }
});

narrow.addEventListener("change", () => showSettings(!narrow.matches));
showSettings(!narrow.matches);
settings.prepare(connect);
connect();
