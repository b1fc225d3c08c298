// What the scripts here have in common, as python/notes.py: two tools over a few notes, a form, a report of what came back.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { z } from "zod";

export const url = process.argv[2];
export const model = "auto";
export const task = "Read the note 'todo' and write its secret into the note 'done'.";
export const question = "Count to three.";
export const chat = "/v1/chat/completions";
export const responses = "/v1/responses";
export const messages = "/v1/messages";
export const place = z.object({ city: z.string(), people: z.number().int() });

const secret = `secret-${randomBytes(6).toString("hex")}`;
const notes = {};
const seen = {};

export const tools = {
  read_note: {
    description: "Return a note.",
    parameters: z.object({ name: z.string() }),
    run: ({ name }) => (name === "todo" ? `It says ${secret}.` : notes[name]),
  },
  write_note: {
    description: "Write a note.",
    parameters: z.object({ name: z.string(), text: z.string() }),
    run: ({ name, text }) => {
      notes[name] = text;
      return "Done.";
    },
  },
};

export function call(name, input) {
  return tools[name].run(typeof input === "string" ? JSON.parse(input) : input);
}

export function worked(endpoint, what, said) {
  seen[`${endpoint} ${what}`] = { said, wanted: `Wrote ${secret}.`, written: notes.done ?? null };
  delete notes.done;
}

export function said(endpoint, what, text) {
  seen[`${endpoint} ${what}`] = { said: text, wanted: "one two three" };
}

export function filled(endpoint, what, form) {
  seen[`${endpoint} ${what}`] = { said: form, wanted: { city: "Kiel", people: 248000 } };
}

export function report(name) {
  const { version } = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  console.log(JSON.stringify({ version, seen }));
}
