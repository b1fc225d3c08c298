// The AI SDK with each of its providers for the three protocols: loops over tools, streams, forms.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import * as notes from "./notes.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const options = { baseURL: `${notes.url}/v1`, apiKey: "unused" };
const models = {
  [notes.chat]: createOpenAICompatible({ ...options, name: "suffice", supportsStructuredOutputs: true })(notes.model),
  [notes.responses]: createOpenAI(options).responses(notes.model),
  [notes.messages]: createAnthropic(options)(notes.model),
};
const tools = Object.fromEntries(
  Object.entries(notes.tools).map(([name, each]) => [
    name,
    tool({ description: each.description, inputSchema: each.parameters, execute: async (input) => each.run(input) }),
  ]),
);

// By default it sends the ids of what the server keeps.
const providerOptions = { openai: { store: false } };

for (const [endpoint, model] of Object.entries(models)) {
  const work = { model, tools, prompt: notes.task, stopWhen: stepCountIs(5), maxRetries: 0, providerOptions };
  notes.worked(endpoint, "tools", (await generateText(work)).text);
  notes.worked(endpoint, "streamed tools", await streamText(work).text);
  notes.said(endpoint, "stream", await streamText({ model, prompt: notes.question, maxRetries: 0 }).text);
  const form = { model, schema: notes.place, prompt: notes.question, maxRetries: 0 };
  notes.filled(endpoint, "form", (await generateObject(form)).object);
  let last;
  for await (last of streamObject(form).partialObjectStream);
  notes.filled(endpoint, "streamed form", last);
}
notes.report("ai");
