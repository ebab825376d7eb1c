// The first view: what ran, its figures with intervals, how acceptance went, and what cost most.
import { Bars, OverTime, Phases } from "./charts.jsx";
import { Facts, Reference, Table } from "./table.jsx";

const Figures = ({ figures }) => (
  <ul class="figures">
    {figures.filter(([, value]) => value !== "–").map(([name, value, interval, of]) => (
      <li><span class="name">{name}</span><b>{value}</b><span class="faint">{interval ? `${interval} (95 %, ${of})` : of}</span></li>
    ))}
  </ul>
);

const Warnings = ({ lines }) => lines.length > 0 && <ul class="warnings">{lines.map((line) => <li>{line}</li>)}</ul>;

export function Overview({ run }) {
  const [values, size] = run.over_time;
  return (
    <main id="main" class="overview">
      <Figures figures={run.figures} />
      {run.findings && <p class={`verdict ${run.findings.failed ? "bad" : "good"}`}><a href="#/findings">{run.findings.failed ? "✗" : "✓"} {run.findings.verdict}</a></p>}
      <Warnings lines={run.warnings} />
      <div class="charts">
        <OverTime values={values} size={size} />
        <Bars title="Acceptance by depth" x="depth" names={["of all drafts", "where tried"]} groups={run.by_depth.map(([depth, per, conditional]) => [depth, [per, conditional]])} />
        <Phases phases={run.phases} />
        <section class="panel"><h2>What ran</h2><Facts pairs={[...run.header, ...(run.rule ? [["rule", run.rule]] : [])]} /></section>
      </div>
      {run.why?.kinds.length > 0 && <section class="panel"><h2>The costliest rejections</h2><p>{run.why.summary}</p><Kinds kinds={run.why.kinds.slice(0, 3)} run={run} /><p><a href="#/rejections">All kinds of rejection</a></p></section>}
    </main>
  );
}

export const Kinds = ({ kinds, run }) => (
  <ol class="kinds">
    {kinds.map(([about, figures, example, sentence]) => <li><p class="strong">{about}</p><p>{figures}</p><p><Reference name={example} run={run.number} />{`: ${sentence}`}</p></li>)}
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
