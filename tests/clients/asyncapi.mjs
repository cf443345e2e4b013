// What AsyncAPI's own parser says of the description of the bus, whose path is the argument; silent when it is right.
import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

const { document, diagnostics } = await new Parser().parse(readFileSync(process.argv[2], "utf8"));
for (const { code, path, message } of diagnostics) console.log(`${code} at ${path.join(".")}: ${message}`);
if (document === undefined) console.log("it cannot be read at all");
