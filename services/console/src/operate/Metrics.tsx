// The metrics that matter, over the last hour or as long as this place has been open.

import { Suspense, lazy, useSyncExternalStore } from "react";
import { Note } from "./parts";
import { SERIES, onSamples, samples } from "./samples";

const Plot = lazy(() => import("./Plot"));

export default function Metrics() {
  const { times, values, wrong } = useSyncExternalStore(onSamples, samples);
  const shown = (value: number) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
  return (
    <section>
      <h2>Metrics</h2>
      <p className="dim">Since this place was opened, an hour at most. Prometheus gets them from <code>/metrics</code>.</p>
      <Note>{wrong}</Note>
      <div className="plots">
        {SERIES.map(({ name, unit, about }, at) => {
          const series = values[at] ?? [];
          const last = series.findLast((value) => value !== null) ?? null;
          return (
            <figure key={name} className="plot">
              <figcaption><b>{name}</b> <span className="plot-value">{last === null ? "–" : `${shown(last)} ${unit}`}</span><span className="dim">{about}</span></figcaption>
              <Suspense fallback={<div className="plot-room" />}><Plot times={times} values={series} name={name} /></Suspense>
            </figure>
          );
        })}
      </div>
    </section>
  );
}
