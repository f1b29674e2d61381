// Vercel AI SDK: node vercel.mjs '{"what": FUNCTION, "base": URL, "model": NAME, "prompt": TEXT}' prints JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { apiKey, base, City, main, model, Person, prompt } from "./samples.mjs";

const openai = createOpenAI({ baseURL: base, apiKey });
const providers = {
  compatible: createOpenAICompatible({
    name: "local", baseURL: base, apiKey, supportsStructuredOutputs: true, includeUsage: true,
  })(model),
  chat: openai.chat(model),
  responses: openai(model),
  messages: createAnthropic({ baseURL: base, apiKey })(model),
};
const tools = {
  weather: tool({ inputSchema: City, execute: async ({ city }) => `sunny in ${city}` }),
  local_time: tool({ inputSchema: City, execute: async ({ city }) => `noon in ${city}` }),
};
const providerOptions = { openai: { store: false } };
// The provider asks for the reasoning of a model whose name it does not know only if it is told that there is some.
const shown = { openai: { store: false, forceReasoning: true, reasoningSummary: "auto" } };
const oneCall = { openai: { store: false, parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } };
const forced = {
  providerOptions: oneCall,
  tools: { weather: tool({ inputSchema: City }), local_time: tool({ inputSchema: City }) },
};
const asked = { prompt, maxRetries: 0, providerOptions };
const steps = (made) => made.map(({ text, reasoningText, toolCalls, finishReason }) => ({
  text, reasoningText, finishReason, calls: toolCalls.map(({ toolName, input }) => [toolName, input]),
}));

const functions = {};
for (const [name, provider] of Object.entries(providers)) {
  const limited = { ...asked, model: provider, maxOutputTokens: 300 };
  functions[`${name}.text`] = async () => {
    const { text, usage, finishReason } = await generateText({ ...asked, model: provider });
    return { text, usage, finishReason };
  };
  functions[`${name}.stream`] = async () => {
    const made = streamText({ ...asked, model: provider });
    let text = "";
    for await (const piece of made.textStream) text += piece;
    return { text, usage: await made.usage, finishReason: await made.finishReason };
  };
  functions[`${name}.tools`] = async () =>
    steps((await generateText({ ...asked, model: provider, tools, stopWhen: stepCountIs(5) })).steps);
  functions[`${name}.reasoning`] = async () =>
    steps((await generateText({ ...asked, model: provider, providerOptions: shown })).steps);
  functions[`${name}.streamTools`] = async () => {
    const made = streamText({ ...asked, model: provider, tools, stopWhen: stepCountIs(5) });
    await made.consumeStream();
    return steps(await made.steps);
  };
  functions[`${name}.required`] = async () =>
    steps((await generateText({ ...limited, ...forced, toolChoice: "required" })).steps);
  functions[`${name}.named`] = async () =>
    steps((await generateText({ ...limited, ...forced, toolChoice: { type: "tool", toolName: "weather" } })).steps);
  functions[`${name}.object`] = async () => (await generateObject({ ...limited, schema: Person })).object;
  functions[`${name}.streamObject`] = async () => {
    const made = streamObject({ ...limited, schema: Person });
    const parts = [];
    for await (const part of made.partialObjectStream) parts.push(part);
    return { parts, object: await made.object };
  };
  functions[`${name}.output`] = async () =>
    (await generateText({ ...limited, output: Output.object({ schema: Person }) })).output;
}
await main(functions);
