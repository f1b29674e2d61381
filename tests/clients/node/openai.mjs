// openai-node: node openai.mjs '{"what": FUNCTION, "base": URL, "model": NAME, "prompt": TEXT}' prints JSON.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { apiKey, base, City, main, model, Person, prompt } from "./samples.mjs";

const client = new OpenAI({ baseURL: base, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: prompt }];
const parameters = z.toJSONSchema(City);
const tool = (name) => ({ type: "function", function: { name, parameters } });
const flat = { type: "function", name: "weather", parameters, strict: false };
const limit = { max_completion_tokens: 300 };

async function forced(tool_choice) {
  const asked = { model, messages, tools: [tool("weather"), tool("local_time")], tool_choice, parallel_tool_calls: false };
  const whole = await client.chat.completions.create({ ...asked, ...limit });
  const streamed = await client.chat.completions.stream({ ...asked, ...limit }).finalChatCompletion();
  return [whole, streamed].map((made) => made.choices[0].message.tool_calls[0].function);
}

await main({
  chat: () => client.chat.completions.create({ model, messages }),
  async stream() {
    const stream = await client.chat.completions.create({
      model, messages, stream: true, stream_options: { include_usage: true },
    });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    return chunks;
  },
  // The client's own loop, which calls the functions until the model answers.
  async runTools() {
    const weather = {
      ...tool("weather"),
      function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
    };
    const time = {
      ...tool("local_time"),
      function: { name: "local_time", parameters, parse: JSON.parse, function: ({ city }) => `noon in ${city}` },
    };
    const runner = client.chat.completions.runTools({ model, messages, tools: [weather, time] });
    return { content: await runner.finalContent(), messages: runner.messages };
  },
  streamTools: () =>
    client.chat.completions.stream({ model, messages, tools: [tool("weather"), tool("local_time")] }).finalChatCompletion(),
  // Conversations whose second turn has the first answer as the helpers return it.
  async streamAgain() {
    const first = await client.chat.completions.stream({ model, messages }).finalMessage();
    return client.chat.completions.stream({ model, messages: [...messages, first, ...messages] }).finalMessage();
  },
  async strictToolAgain() {
    const asked = { model, tools: [zodFunction({ name: "weather", parameters: City })], ...limit };
    const first = (await client.chat.completions.parse({ ...asked, messages })).choices[0].message;
    const result = { role: "tool", tool_call_id: first.tool_calls[0].id, content: "sunny" };
    return (await client.chat.completions.parse({ ...asked, messages: [...messages, first, result] })).choices[0].message;
  },
  required: () => forced("required"),
  named: () => forced({ type: "function", function: { name: "weather" } }),
  strictTool: () =>
    client.chat.completions.parse({ model, messages, tools: [zodFunction({ name: "weather", parameters: City })], ...limit }),
  parse: () =>
    client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Person, "person"), ...limit }),
  parseStream: () =>
    client.chat.completions
      .stream({ model, messages, response_format: zodResponseFormat(Person, "person"), ...limit })
      .finalChatCompletion(),
  response: () => client.responses.create({ model, input: prompt, store: false }),
  async responseTools() {
    const input = [{ role: "user", content: prompt }];
    const stream = client.responses.stream({ model, input, tools: [flat], store: false });
    const first = await stream.finalResponse();
    input.push(...first.output);
    for (const item of first.output)
      if (item.type === "function_call")
        input.push({ type: "function_call_output", call_id: item.call_id, output: "sunny" });
    return [first, await client.responses.create({ model, input, tools: [flat], store: false })];
  },
  responseForced: () =>
    client.responses.create({
      model, input: prompt, tools: [flat], tool_choice: "required", parallel_tool_calls: false, store: false,
      max_output_tokens: 300,
    }),
  responseParse: () =>
    client.responses.parse({
      model, input: prompt, text: { format: zodTextFormat(Person, "person") }, store: false, max_output_tokens: 300,
    }),
});
