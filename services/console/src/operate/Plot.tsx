import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

const HEIGHT = 110;

interface PlotProps {
  /** Seconds since the epoch. */
  times: number[];
  values: (number | null)[];
  name: string;
}

/** A line over time, in the page's colours. */
export default function Plot({ times, values, name }: PlotProps) {
  const room = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef<uPlot.AlignedData>([times, values]);
  latest.current = [times, values];
  useEffect(() => {
    const box = room.current!;
    const draw = () => {
      plot.current?.destroy();
      const colour = (variable: string) => resolved(box, variable);
      const axis: uPlot.Axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      plot.current = new uPlot({
        width: box.clientWidth || 260, height: HEIGHT, legend: { show: false }, cursor: { show: false }, padding: [10, 8, 0, 0],
        // a minute at least: around a single moment it would show days
        scales: { x: { range: (_plot, least, most) => [Math.min(least ?? 0, (most ?? 0) - 60), most ?? 0] }, y: { range: (_plot, least, most) => [Math.min(0, least ?? 0), (most ?? 0) > 0 ? (most ?? 0) * 1.1 : 1] } },
        // no line between moments of which nothing is known: points then say where something was
        axes: [{ ...axis, size: 26, space: 70, values: (_plot, splits) => clocks(splits) }, { ...axis, size: 44, space: 28 }],
        series: [{}, { stroke: colour("--accent"), width: 1.5, spanGaps: false, points: { show: (plot) => plot.data[1]!.some((value) => value === null), size: 4 } }],
      }, latest.current, box);
    };
    draw();
    const sizes = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height: HEIGHT }));
    sizes.observe(box);
    // the colours follow the system and the page's own switch
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    const theme = new MutationObserver(draw);
    theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => { sizes.disconnect(); theme.disconnect(); scheme.removeEventListener("change", draw); plot.current?.destroy(); plot.current = null; };
  }, []);
  useEffect(() => plot.current?.setData([times, values]), [times, values]);
  const last = values.findLast((value) => value !== null);
  return <div ref={room} className="plot-room" role="img" aria-label={last === undefined || last === null ? `${name}: nothing yet` : `${name}, now ${last.toFixed(1)}`} />;
}

/** Moments as one reads them: with seconds where minutes alone would say the same twice. */
export function clocks(seconds: readonly number[]): string[] {
  const close = seconds.some((one, at) => at > 0 && one - seconds[at - 1]! < 60);
  return seconds.map((one) => new Date(one * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(close && { second: "2-digit" }), hour12: false }));
}

/** A colour as a canvas knows it: light-dark() is resolved by giving it to an element. */
function resolved(box: HTMLElement, variable: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  box.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
