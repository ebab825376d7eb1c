// The first view: what ran, its figures with intervals, how acceptance went, and what cost most.
import { Bars, OverTime, Phases } from "./charts.jsx";
import { addressOf } from "./route.js";
import { Facts, Reference, Sentence, Table } from "./table.jsx";

const Figures = ({ figures }) => (
  <ul class="figures">
    {figures.filter(([, value]) => value !== "–").map(([name, value, interval, of]) => (
      <li><span class="name">{name}</span><b>{value}</b><span class="faint">{interval ? `${interval} (95 %, ${of})` : of}</span></li>
    ))}
  </ul>
);

const Warnings = ({ lines }) => lines.length > 0 && <ul class="warnings">{lines.map((line) => <li>{line}</li>)}</ul>;

/** What the findings say; beside that nothing is wrong, what that covers. */
function Verdict({ run }) {
  const { failed, verdict, by } = run.findings, none = !run.by_depth.some(([, rate]) => rate > 0);
  return (
    <p class={`verdict ${failed ? "bad" : none ? "unsure" : "good"}`}>
      <a href="#/findings">{failed ? "✗ " : none ? "" : "✓ "}{verdict}</a>
      {!failed && by === "verify" && <span class="note">{" verify: the sampler's decisions are consistent; it does not judge how good the drafts are"}</span>}
    </p>
  );
}

/** `first`: the place of the first step that ended in a rejection, -1 where there is none or it is not known yet. */
export function Overview({ run, first }) {
  const [values, size] = run.over_time;
  return (
    <main id="main" class="overview">
      <Figures figures={run.figures} />
      {run.findings && <Verdict run={run} />}
      <Warnings lines={run.warnings} />
      <div class="charts">
        <OverTime values={values} size={size} />
        <Bars title="Acceptance by depth" x="depth" names={["of all drafts", "where tried"]} groups={run.by_depth.map(([depth, per, conditional]) => [depth, [per, conditional]])} />
        <Phases phases={run.phases} />
        <section class="panel"><h2>What ran</h2><Facts pairs={[...run.header, ...(run.rule ? [["rule", run.rule]] : [])]} /></section>
      </div>
      {run.why?.kinds.length > 0 && <section class="panel"><h2>The costliest rejections</h2>{first >= 0 && <First run={run} place={first} />}<p>{run.why.summary}</p><Kinds kinds={run.why.kinds.slice(0, 3)} run={run} /><p><a href="#/rejections">All kinds of rejection</a></p></section>}
    </main>
  );
}

function First({ run, place }) {
  const request = run.requestAt(place), index = run.overview.index[place];
  return <p><a class="first" href={addressOf(run.number, request, index)}>{`first rejection ${run.requests[request].id}@${index} (n)`}</a></p>;
}

export const Kinds = ({ kinds, run }) => (
  <ol class="kinds">
    {kinds.map(([about, figures, example, sentence]) => <li><p class="strong">{about}</p><p>{figures}</p><p><Reference name={example} run={run.number} />{": "}<Sentence text={sentence} /></p></li>)}
  </ol>
);

export const Rejections = ({ run }) => (
  <main id="main" class="reading">
    <h2>The costliest kinds of rejection</h2>
    {run.why ? [<p>{run.why.summary}</p>, <Kinds kinds={run.why.kinds} run={run} />, <Warnings lines={run.why.notes} />] : <p>This run holds no steps.</p>}
  </main>
);

export const Analysis = ({ run }) => (
  <main id="main" class="reading"><h2>Figures and questions over many steps</h2><Warnings lines={run.warnings} />{run.tables.map((table) => <Table table={table} run={run.number} />)}</main>
);

const MARKS = { passed: "✓", failed: "✗", skipped: "–" };

export function Findings({ run }) {
  const { findings } = run;
  if (!findings) return <main id="main" class="reading"><p>No findings were asked for: specscope export --findings verify.</p></main>;
  return (
    <main id="main" class="reading">
      <h2>{`Findings of ${findings.by}`}</h2>
      <p class={`verdict ${findings.failed ? "bad" : "good"}`}>{findings.verdict}</p>
      {findings.lines?.length > 0 && <pre class="said">{findings.lines.join("\n")}</pre>}
      {findings.groups.map(([title, checks]) => (
        <section>
          <h3>{title}</h3>
          <ul class="checks">
            {checks.map((check) => (
              <li class={check.result}>
                <span class="mark" role="img" aria-label={check.result}>{MARKS[check.result]}</span> <b>{check.name}</b> <span class="faint">{check.figures}</span>
                {check.result === "failed" && [check.about && `expected: ${check.about}`, check.detail, check.note].filter(Boolean).map((line) => <p>{line}</p>)}
                {check.result === "failed" && check.example !== "–" && <p><Reference name={check.example} run={run.number} /></p>}
              </li>
            ))}
          </ul>
        </section>
      ))}
    </main>
  );
}

export { Warnings };
