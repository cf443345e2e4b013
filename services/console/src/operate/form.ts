// A form made from a JSON schema: which fields a participant's settings have, and what a field's words mean.

import { counted } from "../words";
type Schema = Record<string, unknown>;
export type Kind = "switch" | "choice" | "number" | "text" | "json";

export interface Field {
  /** Where the value stands: the setting, or the setting and one of its parts. */
  path: [string] | [string, string];
  /** The path as one word, unique in the form. */
  id: string;
  description: string;
  kind: Kind;
  /** Whether there may be no value (null): the field is left empty then. */
  optional: boolean;
  whole: boolean;
  choices: string[];
  /** What a number may be, in words; "" for any. */
  range: string;
  default: unknown;
  value: unknown;
  schema: Schema;
}

/** What somebody typed, by the fields' ids. */
export type Draft = Record<string, string | boolean>;
export type Read = { value: unknown } | { wrong: string };

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

export const same = (a: unknown, b: unknown): boolean => {
  if (isObject(a) && isObject(b)) {
    const names = new Set([...Object.keys(a), ...Object.keys(b)]);
    return [...names].every((name) => same(a[name], b[name]));
  }
  return a === b || JSON.stringify(a) === JSON.stringify(b);
};

function resolved(schema: Schema, whole: Schema): { schema: Schema; optional: boolean } {
  const reference = schema["$ref"];
  if (typeof reference === "string") {
    const found = (whole["$defs"] as Record<string, Schema> | undefined)?.[reference.split("/").at(-1) ?? ""];
    return resolved({ ...found, ...schema, $ref: undefined }, whole);
  }
  const choices = Array.isArray(schema["anyOf"]) ? (schema["anyOf"] as Schema[]) : null;
  if (choices) {
    const others = choices.filter((one) => one["type"] !== "null");
    if (others.length === 1) return { schema: { ...resolved(others[0]!, whole).schema, ...schema, anyOf: undefined, type: resolved(others[0]!, whole).schema["type"] }, optional: others.length < choices.length };
  }
  return { schema, optional: false };
}

function kindOf(schema: Schema): Kind {
  if (Array.isArray(schema["enum"]) && schema["enum"].every((one) => typeof one === "string")) return "choice";
  switch (schema["type"]) {
    case "boolean": return "switch";
    case "integer":
    case "number": return "number";
    case "string": return "text";
    default: return "json";
  }
}

function rangeOf(schema: Schema): string {
  const words: string[] = [];
  if (typeof schema["minimum"] === "number") words.push(`${schema["minimum"]} or more`);
  if (typeof schema["exclusiveMinimum"] === "number") words.push(`more than ${schema["exclusiveMinimum"]}`);
  if (typeof schema["maximum"] === "number") words.push(`at most ${schema["maximum"]}`);
  if (typeof schema["exclusiveMaximum"] === "number") words.push(`less than ${schema["exclusiveMaximum"]}`);
  return words.join(", ");
}

/** The fields of a form, in the schema's order. Objects with known parts are taken apart, other ones are JSON. */
export function fieldsOf(schema: Schema, values: Record<string, unknown>): Field[] {
  const fields: Field[] = [];
  const add = (path: Field["path"], part: Schema, value: unknown, preset: unknown) => {
    const { schema: plain, optional } = resolved(part, schema);
    const parts = plain["properties"];
    if (path.length === 1 && isObject(parts) && isObject(value) && !optional) {
      for (const [name, inner] of Object.entries(parts)) {
        const inherited = isObject(preset) && name in preset ? preset[name] : (inner as Schema)["default"];
        add([path[0], name], inner as Schema, value[name], inherited);
      }
      return;
    }
    const kind = kindOf(plain);
    fields.push({
      path, id: path.join("."), kind, optional, value, default: preset,
      description: String(plain["description"] ?? ""),
      whole: plain["type"] === "integer",
      choices: kind === "choice" ? (plain["enum"] as string[]) : levels(plain),
      range: kind === "number" ? rangeOf(plain) : "",
      schema: plain,
    });
  };
  for (const [name, part] of Object.entries((schema["properties"] ?? {}) as Record<string, Schema>)) add([name], part, values[name], part["default"]);
  for (const field of fields) if (field.kind === "text" && field.choices.length) field.kind = "choice";
  return fields;
}

/** A pattern that only lists words is a choice, too: ^(debug|info)$. */
function levels(schema: Schema): string[] {
  const pattern = schema["pattern"];
  const listed = typeof pattern === "string" ? /^\^\(([\w|-]+)\)\$$/.exec(pattern) : null;
  return listed ? listed[1]!.split("|") : [];
}

/** A value as it stands in its field. */
export function written(field: Field, value: unknown): string | boolean {
  if (field.kind === "switch") return value === true;
  if (value === null || value === undefined) return "";
  return field.kind === "json" ? JSON.stringify(value, null, 2) : String(value);
}

/** What the words of a field mean, or what is wrong with them. */
export function read(field: Field, words: string | boolean): Read {
  if (typeof words === "boolean") return { value: words };
  const { schema } = field;
  if (field.optional && words.trim() === "") return { value: null };
  switch (field.kind) {
    case "number": {
      const value = Number(words.trim());
      if (words.trim() === "" || !Number.isFinite(value)) return { wrong: "This must be a number." };
      if (field.whole && !Number.isInteger(value)) return { wrong: "This must be a whole number." };
      const outside = (typeof schema["minimum"] === "number" && value < schema["minimum"])
        || (typeof schema["exclusiveMinimum"] === "number" && value <= schema["exclusiveMinimum"])
        || (typeof schema["maximum"] === "number" && value > schema["maximum"])
        || (typeof schema["exclusiveMaximum"] === "number" && value >= schema["exclusiveMaximum"]);
      return outside ? { wrong: `This must be ${field.range}.` } : { value };
    }
    case "choice":
      return field.choices.includes(words) ? { value: words } : { wrong: `This must be one of ${field.choices.join(", ")}.` };
    case "json":
      try {
        return { value: JSON.parse(words) as unknown };
      } catch {
        return { wrong: "This is not JSON." };
      }
    default: {
      const least = Number(schema["minLength"] ?? 0);
      const most = Number(schema["maxLength"] ?? Infinity);
      if (words.length < least) return { wrong: "This must not be empty." };
      return words.length > most ? { wrong: `This must have at most ${counted(most, "character")}.` } : { value: words };
    }
  }
}

/** What is to be sent for a draft: the settings that are different now, and what is wrong by field. */
export function changes(fields: readonly Field[], draft: Draft): { values: Record<string, unknown>; wrong: Record<string, string> } {
  const values: Record<string, unknown> = {};
  const wrong: Record<string, string> = {};
  for (const field of fields) {
    const words = draft[field.id];
    if (words === undefined) continue;
    const meant = read(field, words);
    if ("wrong" in meant) {
      wrong[field.id] = meant.wrong;
      continue;
    }
    if (same(meant.value, field.value)) continue;
    const [name, part] = field.path;
    if (part === undefined) values[name] = meant.value;
    else {
      // a setting with parts is sent as a whole
      const parts = fields.filter((one) => one.path[0] === name && one.path.length === 2);
      const before = Object.fromEntries(parts.map((one) => [one.path[1]!, one.value]));
      values[name] = { ...before, ...(values[name] as Record<string, unknown> | undefined), [part]: meant.value };
    }
  }
  return { values, wrong };
}

/** The field that a sentence of the API is about; it begins with the setting's name. */
export function blamed(fields: readonly Field[], message: string): string | null {
  const place = message.split(":")[0]!.trim();
  return fields.find((field) => field.id === place || place.startsWith(`${field.id}.`))?.id
    ?? fields.find((field) => field.path[0] === place)?.id ?? null;
}
