// The panel of settings: what of it goes into a request, and what is wrong with it.

const field = (id) => document.getElementById(id);
const KEY = "engine.key";
const EXAMPLES = {
  schema: {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer", minimum: 0 } },
    required: ["name", "age"],
    additionalProperties: false,
  },
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        description: "The weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
};

/** What is wrong with a field; the message is a sentence. */
export class FieldError extends Error {
  constructor(id, message) {
    super(message);
    this.field = field(id);
  }
}

/** Prepares the panel. `keyChanged` is called when another API key was entered. */
export function prepare(keyChanged) {
  field("key").value = sessionStorage.getItem(KEY) ?? "";
  field("key").addEventListener("change", () => {
    if (apiKey()) sessionStorage.setItem(KEY, apiKey());
    else sessionStorage.removeItem(KEY);
    keyChanged();
  });
  field("parameters").addEventListener("submit", (event) => event.preventDefault());
  field("format").addEventListener("change", showWhatApplies);
  for (const id of ["schema", "tools"]) {
    field(id).addEventListener("input", showWhatApplies);
    field(id).addEventListener("change", () => problemOf(id));
  }
  for (const button of document.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => {
      const id = button.dataset.example;
      field(id).value = JSON.stringify(EXAMPLES[id], null, 2);
      problemOf(id);
      showWhatApplies();
      field(id).focus();
      field(id).setSelectionRange(0, 0);
    });
  }
  showWhatApplies();
}

export function apiKey() {
  return field("key").value.trim();
}

/** The system message; empty: none. */
export function systemMessage() {
  return field("system").value.trim() && field("system").value;
}

/** Offers what the model's chat template has a place for. */
export function offerReasoning(template) {
  const effort = template.includes("reasoning_effort");
  const thinking = template.includes("enable_thinking");
  field("effort-field").hidden = !effort;
  field("thinking-field").hidden = !thinking;
  field("reasoning").hidden = !(effort || thinking);
}

/** Whether an answer is to be JSON. */
export function wantsJson() {
  return field("format").value !== "text";
}

/** The fields of a request, those only that are given. Throws FieldError. */
export function parameters() {
  const found = {};
  const set = (name, value) => {
    if (value !== null) found[name] = value;
  };
  set("temperature", number("temperature", "Temperature"));
  set("top_p", number("top_p", "Top p"));
  set("max_tokens", whole("max_tokens", "Max tokens"));
  set("seed", whole("seed", "Seed"));
  if (!field("effort-field").hidden) set("reasoning_effort", field("effort").value || null);
  if (!field("thinking-field").hidden && field("thinking").value) {
    found.chat_template_kwargs = { enable_thinking: field("thinking").value === "true" };
  }
  const format = field("format").value;
  if (format === "json_object") found.response_format = { type: format };
  if (format === "json_schema") {
    found.response_format = { type: format, json_schema: { name: "answer", schema: json("schema", "The JSON schema") } };
  }
  if (field("tools").value.trim()) {
    found.tools = json("tools", "Tools");
    set("tool_choice", field("tool_choice").value || null);
  }
  return found;
}

function showWhatApplies() {
  field("schema-field").hidden = field("format").value !== "json_schema";
  field("choice-field").hidden = !field("tools").value.trim();
}

function number(id, name) {
  const input = field(id);
  if (input.validity.badInput) throw new FieldError(id, `${name} is not a number.`);
  return input.value === "" ? null : input.valueAsNumber;
}

function whole(id, name) {
  const value = number(id, name);
  if (value !== null && !Number.isSafeInteger(value)) {
    throw new FieldError(id, `${name} must be a whole number of at most ${Number.MAX_SAFE_INTEGER}.`);
  }
  return value;
}

function json(id, name) {
  const problem = problemOf(id);
  if (problem) throw new FieldError(id, `${name}: ${problem}`);
  return JSON.parse(field(id).value);
}

/** What is wrong with the JSON of a field, which is also shown below it; empty: nothing. */
function problemOf(id) {
  const text = field(id).value.trim();
  let problem = "";
  try {
    const value = JSON.parse(text || "null");
    if (id === "tools" && text && !Array.isArray(value)) problem = "It must be a list: [ ... ].";
    if (id === "schema" && (value === null || typeof value !== "object" || Array.isArray(value))) {
      problem = "It must be an object: { ... }.";
    }
  } catch (error) {
    problem = `It is not JSON: ${error.message}.`;
  }
  const shown = field(`${id}-problem`);
  shown.textContent = problem;
  shown.hidden = !problem;
  field(id).setAttribute("aria-invalid", String(Boolean(problem)));
  return problem;
}
