// The metrics that matter, over the last hour.

import { Suspense, lazy } from "react";
import type { Key, Moment } from "./history";
import type { PageProps } from "./Operate";
import { Note, Waiting, When } from "./parts";

const Plot = lazy(() => import("./Plot"));

interface Series {
  key: Key;
  name: string;
  unit: string;
  /** What an operator learns from it. */
  about: string;
  /** One unit of what is shown in units of what is told. */
  scale?: number;
}

const SERIES: readonly Series[] = [
  { key: "questions", name: "Questions", unit: "a minute", about: "Accepted by this gateway" },
  { key: "first_word", name: "First word", unit: "s", about: "Mean until the first sign of an answer" },
  { key: "questions_waiting", name: "Questions open", unit: "", about: "Waiting for a generator or in its hands" },
  { key: "work_waiting", name: "Work waiting", unit: "messages", about: "Not yet read, over all participants" },
  { key: "in_flight", name: "In flight", unit: "", about: "What all replicas work at now" },
  { key: "requests", name: "Requests", unit: "a minute", about: "HTTP requests to this gateway" },
  { key: "errors", name: "Errors", unit: "a minute", about: "Answers of 500 and more, except those of /ready" },
  { key: "streams", name: "Open streams", unit: "", about: "Browsers and clients that listen" },
  { key: "dead_letters", name: "Dead letters", unit: "", about: "Messages that nobody could handle" },
  { key: "redis_bytes", name: "Redis' memory", unit: "MB", about: "Used by everything that is kept there", scale: 1_000_000 },
];

export default function Metrics({ history: { moments, wrong } }: PageProps) {
  const shown = (value: number) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
  const times = moments.map(({ at }) => at);
  return (
    <section>
      <h2>Metrics</h2>
      <p className="dim">Since this page was opened, at most the last hour. Prometheus gets them from <code>/metrics</code>.</p>
      <Note>{wrong}</Note>
      {!moments.length && !wrong && <Waiting />}
      {moments.length > 0 && (
        <div className="plots">
          {SERIES.map(({ key, name, unit, about, scale = 1 }) => {
            const series = moments.map(({ values }: Moment) => (values[key] === null ? null : values[key] / scale));
            const at = series.findLastIndex((value) => value !== null);
            const last = series[at] ?? null;
            // the newest that is known may be of an hour ago
            const old = last !== null && at < series.length - 1;
            return (
              <figure key={name} className="plot">
                <figcaption><b>{name}</b> <span className="plot-value">{last === null ? "–" : `${shown(last)} ${unit}`}{old && <span className="dim"> at <When ms={times[at]! * 1000} /></span>}</span><span className="dim">{about}</span></figcaption>
                <Suspense fallback={<div className="plot-room" />}><Plot times={times} values={series} name={name} /></Suspense>
              </figure>
            );
          })}
        </div>
      )}
    </section>
  );
}
