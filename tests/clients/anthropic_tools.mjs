// The @anthropic-ai/sdk npm package: loops over tools, its own runner, its streaming helper, a parsed form.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import * as notes from "./notes.mjs";

const client = new Anthropic({ baseURL: notes.url, apiKey: "unused", maxRetries: 0 });
const common = { model: notes.model, max_tokens: 1000 };
const textOf = (message) => message.content.map((block) => (block.type === "text" ? block.text : "")).join("");

async function work(isStreamed) {
  const messages = [{ role: "user", content: notes.task }];
  const tools = Object.entries(notes.tools).map(([name, tool]) => ({
    name,
    description: tool.description,
    input_schema: z.toJSONSchema(tool.parameters),
  }));
  while (true) {
    const asked = { ...common, messages, tools };
    const answer = isStreamed
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    messages.push({ role: "assistant", content: answer.content });
    if (answer.stop_reason !== "tool_use") return textOf(answer);
    const content = answer.content
      .filter((block) => block.type === "tool_use")
      .map(({ id, name, input }) => ({ type: "tool_result", tool_use_id: id, content: notes.call(name, input) }));
    messages.push({ role: "user", content });
  }
}

notes.worked(notes.messages, "tools", await work(false));
notes.worked(notes.messages, "streamed tools", await work(true));
const last = await client.beta.messages.toolRunner({
  ...common,
  messages: [{ role: "user", content: notes.task }],
  tools: Object.entries(notes.tools).map(([name, tool]) =>
    betaZodTool({ name, description: tool.description, inputSchema: tool.parameters, run: tool.run }),
  ),
});
notes.worked(notes.messages, "tool runner", textOf(last));

const messages = [{ role: "user", content: notes.question }];
notes.said(notes.messages, "stream", await client.messages.stream({ ...common, messages }).finalText());
const form = await client.messages.parse({
  ...common,
  messages,
  output_config: { format: zodOutputFormat(notes.place) },
});
notes.filled(notes.messages, "form", form.parsed_output);
notes.report("@anthropic-ai/sdk");
