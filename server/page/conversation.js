// The conversation so far, as the messages of a request.

/** What a model answers, joined from the chunks of a stream. */
export class Answer {
  content = "";
  reasoning = "";
  /** Tool calls: {id, name, arguments, result}; result is null until there is one. */
  calls = [];
  finishReason = null;
  /** What of the output the server could not read. */
  parseError = null;
  usage = null;

  /** Adds a chunk; the pieces that it brings: {content}, {reasoning}, {call, arguments}. */
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (choice.parse_error) this.parseError = choice.parse_error;
    const delta = choice.delta ?? {};
    const pieces = [];
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) {
      this.reasoning += reasoning;
      pieces.push({ reasoning });
    }
    if (delta.content) {
      this.content += delta.content;
      pieces.push({ content: delta.content });
    }
    for (const part of delta.tool_calls ?? []) pieces.push(this.#addCall(part));
    return pieces;
  }

  #addCall(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "", result: null });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    const text = part.function?.arguments ?? "";
    call.arguments += text;
    return { call: part.index, arguments: text };
  }

  /** Whether the model waits for results of its calls. */
  get waits() {
    return this.calls.some((call) => call.result === null);
  }

  /** Whether nothing at all came. */
  get empty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** The assistant's message, and a message per result. */
  messages() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (!this.calls.length) return [message];
    message.content ||= null;
    message.tool_calls = this.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    const results = this.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }));
    return [message, ...results];
  }
}

/** Turns of the user (texts) and of the model (Answers), in order. */
export class Conversation {
  turns = [];

  /** The messages of a request, after a system message if there is one. */
  messages(system) {
    const said = this.turns.flatMap((turn) =>
      turn instanceof Answer ? turn.messages() : [{ role: "user", content: turn }],
    );
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  /** The last turn if it is the model's. */
  get lastAnswer() {
    const last = this.turns.at(-1);
    return last instanceof Answer ? last : null;
  }
}
