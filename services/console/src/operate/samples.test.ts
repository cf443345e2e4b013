import { expect, test } from "vitest";
import { parsed } from "./prometheus";
import { SERIES, added } from "./samples";

const value = (name: string, now: string, before: string | null, elapsed = 60_000) =>
  SERIES.find((one) => one.name === name)!.value(parsed(now), before === null ? null : parsed(before), elapsed);

test("rates need two moments, levels one", () => {
  expect(value("Questions", "local2_queries_accepted_total 5", null)).toBeNull();
  expect(value("Questions", "local2_queries_accepted_total 5", "local2_queries_accepted_total 2")).toBe(3);
  expect(value("Dead letters", "local2_dead_letters 2", null)).toBe(2);
  expect(value("Redis' memory", "local2_redis_memory_used_bytes 2000000", null)).toBe(2);
});

test("a mean is of what happened between two moments", () => {
  const metrics = (sum: number, count: number) => `local2_query_first_token_seconds_sum ${sum}\nlocal2_query_first_token_seconds_count ${count}`;
  expect(value("First word", metrics(10, 4), metrics(4, 2))).toBe(3);
  expect(value("First word", metrics(4, 2), metrics(4, 2))).toBeNull();
});

test("only errors of the server are errors", () => {
  const now = 'local2_http_requests_total{route="/x",status="503"} 4\nlocal2_http_requests_total{route="/x",status="200"} 90';
  const before = 'local2_http_requests_total{route="/x",status="503"} 1\nlocal2_http_requests_total{route="/x",status="200"} 10';
  expect(value("Errors", now, before)).toBe(3);
});

test("what is older than an hour is dropped", () => {
  let kept = { times: [] as number[], values: SERIES.map(() => [] as (number | null)[]), wrong: "x" };
  for (const minute of [0, 30, 61]) kept = added(kept, minute * 60_000, SERIES.map(() => minute));
  expect(kept.times).toEqual([1800, 3660]);
  expect(kept.values[0]).toEqual([30, 61]);
  expect(kept.wrong).toBe("");
});
