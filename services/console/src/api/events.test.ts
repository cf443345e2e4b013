import { expect, it } from "vitest";
import { EventParser } from "./events";

it("reads events whole wherever the stream is cut", () => {
  const stream = ': keep-alive\n\nid: 1-1\nevent: answer\ndata: {"text":"é\\n"}\n\nid: 1-2\r\nevent: a\r\ndata: x\r\ndata: y\r\n\r\n';
  const all = new Set<string>();
  for (let cut = 0; cut <= stream.length; cut += 1) {
    const parser = new EventParser();
    all.add(JSON.stringify([...parser.take(stream.slice(0, cut)), ...parser.take(stream.slice(cut))]));
  }
  expect([...all].map((one) => JSON.parse(one) as unknown)).toEqual([[
    { id: "1-1", type: "answer", data: '{"text":"é\\n"}' },
    { id: "1-2", type: "a", data: "x\ny" },
  ]]);
});
