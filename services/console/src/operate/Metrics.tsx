// The metrics that matter, over the last hour.

import { Suspense, lazy } from "react";
import { useAsked, type Shapes } from "./asking";
import { Note, Waiting, When } from "./parts";

const Plot = lazy(() => import("./Plot"));
// As often as the gateway looks, in ms.
const EVERY = 15_000;

interface Series {
  key: keyof Shapes["HourSeries"];
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

export default function Metrics() {
  const { found, wrong } = useAsked<Shapes["MetricsHour"]>("metrics/hour", EVERY);
  const shown = (value: number) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
  return (
    <section>
      <h2>Metrics</h2>
      <p className="dim">The last hour, or since this gateway was started. Prometheus gets them from <code>/metrics</code>.</p>
      <Note>{wrong}</Note>
      {!found && !wrong && <Waiting />}
      {found?.times.length === 0 && <p>The gateway has just started. It looks every {found.every} seconds.</p>}
      {found && found.times.length > 0 && (
        <div className="plots">
          {SERIES.map(({ key, name, unit, about, scale = 1 }) => {
            const series = found.series[key].map((value) => (value === null ? null : value / scale));
            const at = series.findLastIndex((value) => value !== null);
            const last = series[at] ?? null;
            // the newest that is known may be of an hour ago
            const old = last !== null && at < series.length - 1;
            return (
              <figure key={name} className="plot">
                <figcaption><b>{name}</b> <span className="plot-value">{last === null ? "–" : `${shown(last)} ${unit}`}{old && <span className="dim"> at <When ms={found.times[at]! * 1000} /></span>}</span><span className="dim">{about}</span></figcaption>
                <Suspense fallback={<div className="plot-room" />}><Plot times={found.times} values={series} name={name} /></Suspense>
              </figure>
            );
          })}
        </div>
      )}
    </section>
  );
}
