// The place of operators: a list of pages at the side, and the one that is looked at.

import { Suspense, lazy, useEffect, type ComponentType } from "react";
import * as Ariakit from "@ariakit/react";
import { useHistory } from "./history";
import { Waiting } from "./parts";
import { PLACES, placeOf, type Place } from "./places";
import "./operate.css";

export interface PageProps {
  /** What follows the page's name in the address. */
  rest: string[];
  onGo(page: string): void;
  /** The metrics since the place of operators was opened. */
  history: ReturnType<typeof useHistory>;
}

const PAGES: Record<Place, ComponentType<PageProps>> = {
  participants: lazy(() => import("./Participants")),
  health: lazy(() => import("./Health")),
  bus: lazy(() => import("./Bus")),
  metrics: lazy(() => import("./Metrics")),
  "dead-letters": lazy(() => import("./DeadLetters")),
  memory: lazy(() => import("./Memory")),
  knowledge: lazy(() => import("./Knowledge")),
  critic: lazy(() => import("./Critic")),
  ranking: lazy(() => import("./Ranking")),
  experiments: lazy(() => import("./Experiments")),
  retention: lazy(() => import("./Retention")),
  keys: lazy(() => import("./Keys")),
};

export default function Operate({ page, onPage }: { page: string; onPage(page: string): void }) {
  const { place, rest } = placeOf(page);
  const Page = PAGES[place];
  const history = useHistory();
  // on a narrow screen the list is a line that scrolls
  useEffect(() => { void document.getElementById(place)?.scrollIntoView?.({ block: "nearest", inline: "nearest" }); }, [place]);
  return (
    <div className="operate">
      <Ariakit.TabProvider selectedId={place} setSelectedId={(id) => { if (id && id !== place) onPage(id); }} selectOnMove={false} orientation="both">
        <Ariakit.TabList className="operate-list" aria-label="Operate">
          {Object.entries(PLACES).map(([id, name]) => (
            <Ariakit.Tab key={id} id={id} className="operate-tab" onClick={() => { if (id === place && rest.length) onPage(id); }}>{name}</Ariakit.Tab>
          ))}
        </Ariakit.TabList>
        <main className="operate-page" tabIndex={0}>
          <Ariakit.TabPanel tabId={place} className="operate-panel" focusable={false}>
            <Suspense fallback={<Waiting />}><Page rest={rest} onGo={onPage} history={history} /></Suspense>
          </Ariakit.TabPanel>
        </main>
      </Ariakit.TabProvider>
    </div>
  );
}
