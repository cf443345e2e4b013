import { expect, test } from "vitest";
import { between, totals, type Key, type Totals } from "./history";

test("totals sum a metric over its labels, without the probe's answers in the errors", () => {
  const found = totals([
    "# HELP local2_http_requests_total HTTP requests answered",
    "# TYPE local2_http_requests_total counter",
    'local2_http_requests_total{method="POST",route="/query",status="200"} 90.0',
    'local2_http_requests_total{method="GET",route="/queries/{query_id}",status="500"} 1.0',
    'local2_http_requests_total{method="POST",route="/query",status="503"} 3.0',
    'local2_http_requests_total{method="GET",route="/ready",status="503"} 40.0',
    "local2_redis_memory_used_bytes 2.5e+06",
    "",
  ].join("\n"));
  expect(found).toEqual({ errors: 4, local2_http_requests_total: 134, local2_redis_memory_used_bytes: 2_500_000 });
});

const UP = { local2_bus_up: 1 };
const words = (count: number, spent: number): Totals => ({ ...UP, local2_first_word_seconds_count: count, local2_first_word_seconds_sum: spent });

test.each<[string, Totals | null, Totals, number, Key, number | null]>([
  ["a counter is a rate a minute", { local2_queries_accepted_total: 2 }, { local2_queries_accepted_total: 5 }, 30, "questions", 6],
  ["a missing counter is 0", {}, {}, 60, "questions", 0],
  ["the first moment has no rate", null, { local2_http_requests_total: 9 }, 0, "requests", null],
  ["a restarted gateway counts anew", { local2_http_requests_total: 90 }, { local2_http_requests_total: 5 }, 60, "requests", 5],
  ["a clock that is set back divides by nothing", {}, { local2_http_requests_total: 5 }, -40, "requests", null],
  ["a level is as it is", { local2_dead_letters: 9 }, { local2_dead_letters: 1 }, 15, "dead_letters", 1],
  ["a level of a bus that is away is not known", { local2_group_lag: 4 }, {}, 15, "work_waiting", null],
  ["a mean is of what came in between", words(2, 4), words(4, 10), 15, "first_word", 3],
  ["nothing in between has no mean", words(2, 4), words(2, 4), 15, "first_word", null],
  ["fewer than before: a replica has left", words(9, 30), words(4, 10), 15, "first_word", null],
  ["a smaller sum: a replica has left", words(4, 30), words(5, 10), 15, "first_word", null],
  ["after a time without the bus a mean is not known", {}, words(100, 900), 15, "first_word", null],
  ["the first answer ever has a mean", UP, words(1, 9), 15, "first_word", 9],
])("%s", (_name, before, now, seconds, key, value) => {
  expect(between(before, now, seconds)[key]).toBe(value);
});
