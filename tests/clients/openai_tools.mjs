// The openai npm package: loops over tools at both endpoints, its own runner, the streaming helpers, parsed forms.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as notes from "./notes.mjs";

const client = new OpenAI({ baseURL: `${notes.url}/v1`, apiKey: "unused", maxRetries: 0 });
const model = notes.model;
const functions = Object.entries(notes.tools).map(([name, tool]) => ({
  name,
  description: tool.description,
  parameters: z.toJSONSchema(tool.parameters),
  strict: true,
}));

async function byChat(isStreamed) {
  const messages = [{ role: "user", content: notes.task }];
  const tools = functions.map((each) => ({ type: "function", function: each }));
  while (true) {
    const asked = { model, messages, tools };
    const answer = isStreamed
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    const { message } = answer.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const { id, function: called } of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: id, content: notes.call(called.name, called.arguments) });
  }
}

async function byItems(isStreamed) {
  const input = [{ role: "user", content: notes.task }];
  const tools = functions.map((each) => ({ type: "function", ...each }));
  while (true) {
    const asked = { model, input, tools };
    const answer = isStreamed
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    input.push(...answer.output);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    for (const { call_id, name, arguments: given } of calls)
      input.push({ type: "function_call_output", call_id, output: notes.call(name, given) });
  }
}

for (const isStreamed of [false, true]) {
  const what = isStreamed ? "streamed tools" : "tools";
  notes.worked(notes.chat, what, await byChat(isStreamed));
  notes.worked(notes.responses, what, await byItems(isStreamed));
}

const runner = client.chat.completions.runTools({
  model,
  stream: true,
  messages: [{ role: "user", content: notes.task }],
  tools: functions.map((each) => ({
    type: "function",
    function: { ...each, function: notes.tools[each.name].run, parse: JSON.parse },
  })),
});
notes.worked(notes.chat, "tool runner", await runner.finalContent());

const messages = [{ role: "user", content: notes.question }];
const form = await client.chat.completions.parse({
  model,
  messages,
  response_format: zodResponseFormat(notes.place, "place"),
});
notes.filled(notes.chat, "form", form.choices[0].message.parsed);
const item = await client.responses.parse({
  model,
  input: notes.question,
  text: { format: zodTextFormat(notes.place, "place") },
});
notes.filled(notes.responses, "form", item.output_parsed);

let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
notes.said(notes.chat, "stream", text);
text = "";
for await (const event of await client.responses.create({ model, input: notes.question, stream: true }))
  if (event.type === "response.output_text.delta") text += event.delta;
notes.said(notes.responses, "stream", text);
notes.report("openai");
