// A node: why it was kept or not, what decided, its facts, and what target and drafter found likeliest there.
import { HEAD } from "./data.js";
import { fixed, probability } from "./numbers.js";
import { Place, aboutLikeliest, coinOnLine, coinSign, nodeRows, said, typical, why } from "./place.js";
import { UNTRIED } from "./step.js";
import { Sentence } from "./table.jsx";
import { CoinLine } from "./tree.jsx";

const LABELS = HEAD.words.labels, TARGETS = ["p", "raw_p", "p_tried"];

function Numbers({ step, number }) {
  const place = Place.at(step, number), { node } = place, isTried = node && node.outcome !== UNTRIED && !step.greedy && step.tellsP;
  return (
    <table class="numbers">
      <tbody>
        {isTried && <tr><th scope="row">coin</th><td class="figure">{node.coin ? probability(node.coin) : "none"}</td><td><CoinLine a={node.a} coin={coinOnLine(step, node)} outcome={node.outcome} /> {`${coinSign(step, node)} a ${probability(node.a)}`}</td></tr>}
        {Object.entries(place.numbers).map(([name, value]) => (
          <tr><th scope="row">{LABELS[name]}</th><td class="figure">{probability(value)}</td><td><div class={`meter ${TARGETS.includes(name) ? "target" : "drafter"}`} style={{ width: `${100 * Math.min(Math.max(value, 0), 1) || 0}%` }} /></td></tr>
        ))}
      </tbody>
    </table>
  );
}

/** The likeliest tokens of one model at a place. */
function Likeliest({ place, name, tokens, entropy, kind }) {
  const { vocabulary } = place.step.run;
  return (
    <section>
      <h4>{name}{entropy > 0 && <span class="faint">{` H ${fixed(entropy, 2)} nats`}</span>}</h4>
      <table class="likeliest">
        <tbody>
          {tokens.map(({ token, p }) => (
            <tr class={token === place.token ? "mine" : ""}>
              <th scope="row">{token === place.token && <span class="here" aria-label="this token">▸</span>}{vocabulary.show(token)}</th>
              <td class="figure">{probability(p)}</td>
              <td class="bars"><div class={`meter ${kind}`} style={{ width: `${100 * p}%` }} /></td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function Node({ step, number }) {
  const place = Place.at(step, number), sentences = why(step, number), usual = typical(step, number);
  return (
    <section class="panel node" aria-label="Decision" aria-live="polite">
      <header><h2>{number === step.size ? "Final token" : `Node ${number}`}</h2><span class="faint">{`${step.name}/${number}`}</span></header>
      <div class="why">{sentences.map((sentence, i) => <p class={i ? "" : "strong"}><Sentence text={sentence} /></p>)}{usual && <p class="faint">{usual}</p>}</div>
      <Numbers step={step} number={number} />
      <dl class="facts">{nodeRows(step, number).map(([label, text, odd]) => [<dt>{label || "\u00a0"}</dt>, <dd class={odd ? "warn" : ""}>{text}</dd>])}</dl>
      {place.notes ? (
        <div class="distributions">
          <Likeliest place={place} name={said("target's likeliest")} tokens={place.likeliest} entropy={place.notes.entropy} kind="target" />
          {place.draftersLikeliest.length > 0 && <Likeliest place={place} name={said("drafter's likeliest")} tokens={place.draftersLikeliest} entropy={place.notes.qEntropy} kind="drafter" />}
          {aboutLikeliest(place).map((line) => <p class="note">{line}</p>)}
        </div>
      ) : (
        step.judged && <p class="note">No distribution is recorded here: only places where children were tried have one, with full evidence.</p>
      )}
    </section>
  );
}
