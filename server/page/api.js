// Asks the server that this page comes from. Addresses are relative, so that a proxy may serve all of it below a path.

/** What the server refused, or what failed; the message is a sentence for people. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The JSON that the server answers to a GET. Throws ApiError. */
export async function get(path, key) {
  const response = await ask(path, { headers: authorization(key) });
  return response.json();
}

/**
 * The chunks of a chat's answer, as they come. Throws ApiError, and AbortError when `signal` is aborted: the connection
 * is then closed, and the server stops.
 */
export async function* streamChat(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key) },
    body: JSON.stringify(body),
    signal,
  });
  const events = new EventReader();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let complete = false;
  try {
    while (true) {
      const { done, value } = await read(reader, signal);
      if (done && complete) return;
      if (done) throw new ApiError("The connection ended before the answer was complete. Try again.");
      for (const data of events.feed(value)) {
        complete ||= data === "[DONE]";
        if (complete) break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Splits a stream of server-sent events, however it is cut, into the data of each. */
export class EventReader {
  #line = "";
  #data = [];

  feed(text) {
    const lines = (this.#line + text).split("\n");
    this.#line = lines.pop();
    const found = [];
    for (const line of lines) {
      const whole = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (whole.startsWith("data:")) {
        this.#data.push(whole.slice(whole[5] === " " ? 6 : 5));
      } else if (whole === "" && this.#data.length) {
        found.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return found;
  }
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  } catch (error) {
    throw unreachable(error, options.signal);
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy answered, not the server: the status says most.
  }
  throw new ApiError(message, response.status);
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw unreachable(error, signal);
  }
}

/** An error of fetch as a sentence; an AbortError stays what it is. */
function unreachable(error, signal) {
  if (signal?.aborted) return new DOMException("stopped", "AbortError");
  if (error instanceof TypeError && /header|ISO-8859-1|ByteString/i.test(error.message)) {
    return new ApiError("The API key has characters that no header can have.", 401);
  }
  return new ApiError("The connection to the server failed. Is it running?");
}
