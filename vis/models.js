// Models as lists of tensors: instruments.tensors, function by function. No page in here.

const MOST_TENSORS = 5000;
const MOST_ELEMENTS = 1e12;
const EXPECTED = 'a name and a shape, such as "fc.weight (10, 20)", or a number of elements';

const product = (numbers) => numbers.reduce((all, number) => all * number, 1);

// Builders: a tensor is { name, shape, products } -----------------------------------------------

const tensor = (name, shape, products = 0) => ({ name, shape, products });

const linear = (name, rows, columns, products = 1, bias = true) => [
  tensor(`${name}.weight`, [rows, columns], products),
  ...(bias ? [tensor(`${name}.bias`, [rows])] : []),
];

const norm = (name, width) => [tensor(`${name}.weight`, [width]), tensor(`${name}.bias`, [width])];

const model = (title, unit, parameters, tied = false, more = {}) => ({ title, unit, parameters, tied, ...more });

const repeat = (count, build) => Array.from({ length: count }, (_, i) => build(i)).flat();

/** `config`: hidden, inner, layers, heads, key heads, vocabulary. With `labels` a classifier. */
function llama(title, [hidden, inner, layers, heads, keyHeads, vocabulary], { tied = true, labels = 0 } = {}) {
  const keys = Math.floor(hidden / heads) * keyHeads;
  const bare = (name, rows, columns) => linear(name, rows, columns, 1, false);
  return model(title, "token", [
    tensor("embed_tokens.weight", [vocabulary, hidden]),
    ...repeat(layers, (number) => {
      const layer = `layers.${number}`;
      return [
        ...bare(`${layer}.self_attn.q_proj`, hidden, hidden),
        ...bare(`${layer}.self_attn.k_proj`, keys, hidden),
        ...bare(`${layer}.self_attn.v_proj`, keys, hidden),
        ...bare(`${layer}.self_attn.o_proj`, hidden, hidden),
        ...bare(`${layer}.mlp.gate_proj`, inner, hidden),
        ...bare(`${layer}.mlp.up_proj`, inner, hidden),
        ...bare(`${layer}.mlp.down_proj`, hidden, inner),
        tensor(`${layer}.input_layernorm.weight`, [hidden]),
        tensor(`${layer}.post_attention_layernorm.weight`, [hidden]),
      ];
    }),
    tensor("norm.weight", [hidden]),
    ...(labels ? bare("score", labels, hidden) : tied ? [] : bare("lm_head", vocabulary, hidden)),
  ], tied && !labels, { shape: [hidden, inner, layers, heads, keyHeads], vocabulary: labels ? 0 : vocabulary });
}

function gpt2(title, hidden, layers, vocabulary, length) {
  const transposed = (name, inputs, outputs) =>
    [tensor(`${name}.weight`, [inputs, outputs], 1), tensor(`${name}.bias`, [outputs])];
  return model(title, "token", [
    tensor("wte.weight", [vocabulary, hidden]),
    tensor("wpe.weight", [length, hidden]),
    ...repeat(layers, (number) => {
      const layer = `h.${number}`;
      return [
        ...norm(`${layer}.ln_1`, hidden),
        ...transposed(`${layer}.attn.c_attn`, hidden, 3 * hidden),
        ...transposed(`${layer}.attn.c_proj`, hidden, hidden),
        ...norm(`${layer}.ln_2`, hidden),
        ...transposed(`${layer}.mlp.c_fc`, hidden, 4 * hidden),
        ...transposed(`${layer}.mlp.c_proj`, 4 * hidden, hidden),
      ];
    }),
    ...norm("ln_f", hidden),
  ], true);
}

function bert(title, hidden, layers, vocabulary) {
  return model(title, "token", [
    tensor("embeddings.word_embeddings.weight", [vocabulary, hidden]),
    tensor("embeddings.position_embeddings.weight", [512, hidden]),
    tensor("embeddings.token_type_embeddings.weight", [2, hidden]),
    ...norm("embeddings.LayerNorm", hidden),
    ...repeat(layers, (number) => {
      const layer = `layer.${number}`;
      return [
        ...["query", "key", "value"].flatMap((name) => linear(`${layer}.attention.self.${name}`, hidden, hidden)),
        ...linear(`${layer}.attention.output.dense`, hidden, hidden),
        ...norm(`${layer}.attention.output.LayerNorm`, hidden),
        ...linear(`${layer}.intermediate.dense`, 4 * hidden, hidden),
        ...linear(`${layer}.output.dense`, hidden, 4 * hidden),
        ...norm(`${layer}.output.LayerNorm`, hidden),
      ];
    }),
    ...linear("pooler.dense", hidden, hidden, 0),
    tensor("cls.predictions.bias", [vocabulary]),
    ...linear("cls.predictions.transform.dense", hidden, hidden),
    ...norm("cls.predictions.transform.LayerNorm", hidden),
    ...linear("cls.seq_relationship", 2, hidden, 0),
  ], true);
}

function vit(title, hidden, layers, patch, classes) {
  const patches = Math.floor(224 / patch) ** 2;
  const tokens = patches + 1;
  return model(title, "image", [
    tensor("cls_token", [1, 1, hidden]),
    tensor("position_embeddings", [1, tokens, hidden]),
    tensor("patch_embeddings.weight", [hidden, 3, patch, patch], patches),
    tensor("patch_embeddings.bias", [hidden]),
    ...repeat(layers, (number) => {
      const layer = `layers.${number}`;
      return [
        ...["q_proj", "k_proj", "v_proj", "o_proj"].flatMap((name) => linear(`${layer}.attention.${name}`, hidden, hidden, tokens)),
        ...norm(`${layer}.layernorm_before`, hidden),
        ...norm(`${layer}.layernorm_after`, hidden),
        ...linear(`${layer}.mlp.fc1`, 4 * hidden, hidden, tokens),
        ...linear(`${layer}.mlp.fc2`, hidden, 4 * hidden, tokens),
      ];
    }),
    ...norm("layernorm", hidden),
    ...linear("classifier", classes, hidden),
  ]);
}

function resnet50(title) {
  const convolution = (name, batchNorm, outputs, inputs, size, side) =>
    [tensor(`${name}.weight`, [outputs, inputs, size, size], side * side), ...norm(batchNorm, outputs)];
  const parameters = convolution("conv1", "bn1", 64, 3, 7, 112);
  let inputs = 64;
  [3, 4, 6, 3].forEach((blocks, stage) => {
    const width = 64 * 2 ** stage;
    const side = 56 / 2 ** stage;
    for (let number = 0; number < blocks; number += 1) {
      const block = `layer${stage + 1}.${number}`;
      const before = stage > 0 && number === 0 ? 2 * side : side;
      parameters.push(
        ...convolution(`${block}.conv1`, `${block}.bn1`, width, inputs, 1, before),
        ...convolution(`${block}.conv2`, `${block}.bn2`, width, width, 3, side),
        ...convolution(`${block}.conv3`, `${block}.bn3`, 4 * width, width, 1, side),
        ...(number === 0 ? convolution(`${block}.downsample.0`, `${block}.downsample.1`, 4 * width, inputs, 1, side) : []));
      inputs = 4 * width;
    }
  });
  return model(title, "image", [...parameters, ...linear("fc", 1000, inputs)]);
}

const SMOLLM2_360M = [960, 2560, 32, 15, 5, 49152];

/** instruments.tensors.MODELS. */
export const MODELS = {
  "resnet-50": resnet50("ResNet-50"),
  "vit-b-16": vit("ViT-B/16", 768, 12, 16, 1000),
  "bert-large": bert("BERT-Large", 1024, 24, 30522),
  "gpt-2": gpt2("GPT-2, 124M", 768, 12, 50257, 1024),
  "smollm2-135m": llama("SmolLM2-135M", [576, 1536, 30, 9, 3, 49152]),
  "smollm2-360m": llama("SmolLM2-360M", SMOLLM2_360M),
  "smollm2-360m-classifier": llama("SmolLM2-360M, classifier", SMOLLM2_360M, { labels: 2 }),
  "smollm2-1.7b": llama("SmolLM2-1.7B", [2048, 8192, 24, 32, 32, 49152]),
  "llama-3-8b": llama("Llama-3 8B", [4096, 14336, 32, 32, 8, 128256], { tied: false }),
};

// What is asked of a model --------------------------------------------------------------------

export const elementsOf = ({ shape }) => product(shape);

export const totalElements = ({ parameters }) => parameters.reduce((sum, part) => sum + elementsOf(part), 0);

/** Multiplications in forward for one token or image; attention's own left out. */
export function productsOf({ parameters, tied }) {
  const counted = parameters.reduce((sum, part) => sum + elementsOf(part) * part.products, 0);
  return counted + (tied ? elementsOf(parameters[0]) : 0);
}

/** A layer of the simulator for each tensor; a third of the compute is forward. */
export function layersOf(chosen, compute, gradientBytes = 4) {
  const second = compute / 3 / Math.max(1, productsOf(chosen));
  const layer = (forward, gradients) => ({ forward, backward: 2 * forward, gradients });
  const made = chosen.parameters.map((part) =>
    layer(second * elementsOf(part) * part.products, [gradientBytes * elementsOf(part)]));
  return chosen.tied ? [...made, layer(second * elementsOf(chosen.parameters[0]), [])] : made;
}

// A list of one's own -------------------------------------------------------------------------

const LINE = /^(?:(?<name>\S+?):?\s+)?(?:(?:torch\.Size\()?[([](?<shape>[\d,\s]*)[)\]]\)?|(?<number>\d+))$/;
const EMBEDDING = /emb|wte|wpe/i;

const brief = (line) => (line.length <= 40 ? `"${line}"` : `"${line.slice(0, 40)}…"`);

/** The model that a text lists, a tensor in each line; throws an Error of one line. */
export function parse(text, title = "your list") {
  const parameters = text.split("\n").map((line, i) => [line.trim(), i + 1]).filter(([line]) => line).map(([line, number]) => {
    const found = LINE.exec(line)?.groups;
    if (!found) throw new Error(`line ${number}: expected ${EXPECTED}, not ${brief(line)}`);
    const shape = ((found.number ?? found.shape).match(/\d+/g) ?? []).map(Number);
    if (product(shape) === 0) throw new Error(`line ${number}: expected at least 1 element, not ${brief(line)}`);
    const multiplies = (shape.length >= 2 || found.number !== undefined) && !EMBEDDING.test(found.name ?? "");
    return tensor(found.name ?? "", shape, multiplies ? 1 : 0);
  });
  if (!parameters.length) throw new Error(`the list is empty: expected ${EXPECTED} in each line`);
  if (parameters.length > MOST_TENSORS) throw new Error(`the list has ${parameters.length} tensors, expected at most ${MOST_TENSORS}`);
  const made = model(title, "token", parameters);
  if (totalElements(made) > MOST_ELEMENTS) throw new Error(`the list has too many elements, expected at most ${MOST_ELEMENTS}`);
  return made;
}
