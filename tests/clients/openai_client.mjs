// The openai npm package against a running server: `node openai_client.mjs BASE_URL`. Prints what it saw as one JSON line.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "one two three" }];
const seen = {};

const { data: whole, response } = await client.chat.completions.create({ model: "auto", messages }).withResponse();
seen.whole = whole.choices[0].message.content;
seen.tier = response.headers.get("x-suffice-tier");
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

const stream = await client.chat.completions.create({
  model: "auto",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
let finish = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
seen.streamed = streamed;
seen.finish = finish;
seen.completion_tokens = usage.completion_tokens;

const helper = client.chat.completions.stream({ model: "simple", messages });
seen.helper = (await helper.finalChatCompletion()).choices[0].message.content;

const completion = await client.completions.create({ model: "auto", prompt: "a b", max_tokens: 5 });
seen.completion = completion.choices[0].text;

// The client asks for base64 by itself and decodes it.
const embedding = await client.embeddings.create({ model: "small", input: ["x", "y"] });
seen.norms = embedding.data.map((each) => Math.hypot(...each.embedding));

seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);

const abort = new AbortController();
const cut = await client.chat.completions.create({ model: "slow", messages, stream: true }, { signal: abort.signal });
for await (const _ of cut) {
  abort.abort();
  break;
}

for (const [name, body] of [
  ["unknown_model", { model: "gpt-9", messages }],
  ["bad_value", { model: "auto", messages, temperature: 9 }],
]) {
  try {
    await client.chat.completions.create(body);
    seen[name] = null;
  } catch (error) {
    seen[name] = [error.constructor.name, error.status, error.code, error.param];
  }
}

try {
  for await (const _ of await client.chat.completions.create({ model: "broken", messages, stream: true }));
  seen.broken = null;
} catch (error) {
  seen.broken = error.code;
}
console.log(JSON.stringify(seen));
