// What others measured, as measurements/ holds it: a test compares every number.

/** All-reduces by table: points of [bytes of the tensor, microseconds], in place. */
export const ALL_REDUCE = {
  allreduce_h100_8gpu: {
    name: "8 × H100, one node",
    ranks: 8,
    source: ["NVIDIA", "https://github.com/NVIDIA/dgxc-benchmarking"],
    points: [
      [65536, 18.85], [131072, 19.19], [262144, 19.5], [524288, 19.7], [1048576, 26.93],
      [2097152, 42.09], [4194304, 53.82], [8388608, 82.03], [16777216, 123.0], [33554432, 198.9],
      [67108864, 324.7], [134217728, 586.0], [268435456, 1113.4], [536870912, 2149.3],
      [1073741824, 4016.4], [2147483648, 7938.0], [4294967296, 15754],
    ],
  },
  allreduce_rtx2080ti_32gpu: {
    name: "32 × RTX 2080 Ti, 10 Gb/s Ethernet",
    ranks: 32,
    source: ["D. Xu", "https://github.com/dexhunter/allreduce-experiments"],
    points: [
      [65536, 1269.1], [131072, 1641.8], [262144, 1898.7], [524288, 2022.0], [1048576, 2284.2],
      [2097152, 3494.7], [4194304, 6940.2], [8388608, 13848], [16777216, 27690], [33554432, 55377],
      [67108864, 110802], [134217728, 221988], [268435456, 443084], [536870912, 887027],
    ],
  },
};

/** Trainings by table: points of [GPUs, work per second], `per` GPU or in all. */
export const SCALING = {
  ddp_scaling_bert_large_a100: {
    name: "BERT-Large, A100, accumulated",
    per: "all",
    source: ["NVIDIA", "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/LanguageModeling/BERT"],
    points: [[8, 4553], [16, 9191], [32, 18119], [64, 35774], [128, 70555], [256, 138294]],
  },
  dp_scaling_ultrascale_playbook: {
    name: "Ultra-Scale Playbook, plain data parallelism",
    per: "gpu",
    source: ["Nanotron team, Hugging Face", "https://huggingface.co/spaces/nanotron/ultrascale-playbook"],
    points: [[8, 40149.94], [16, 37609.69], [32, 35367.61], [64, 31112.23], [128, 26446.44], [256, 15700.38]],
  },
};
