"""PRISM for transformers: `prism export` puts this file and prism_twin.py, the mathematics, beside a model.

    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)

A linear recurrence has a state in place of a key/value cache. Here nothing is kept from call to call: generate()
computes the whole row again for each token, which is the same and slower. `prism generate` keeps the state.
"""
from dataclasses import fields

from torch import LongTensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .prism_twin import Config, Mixer, Prism, chunked_scan

Mixer.scan = staticmethod(chunked_scan)


class PrismConfig(PretrainedConfig):
    """config.json of SPEC section 8, and what transformers adds to it."""
    model_type = "prism"

    def __init__(self, **given):
        for key, default in vars(Config()).items():
            setattr(self, key, given.get(key, default))
        super().__init__(**given)


class PrismForCausalLM(PreTrainedModel, GenerationMixin):
    """Weights come from a checkpoint: without one they are NaN (`prism init` draws new ones)."""
    config_class = PrismConfig
    _is_stateful = True  # generate() makes no cache of keys and values
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]

    def __init__(self, config: PrismConfig):
        super().__init__(config)
        prism = Prism(Config(**{f.name: getattr(config, f.name) for f in fields(Config)}))
        self.c, self.model, self.lm_head = prism.c, prism.model, prism.lm_head
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embeddings

    def forward(self, input_ids: LongTensor, attention_mask: LongTensor | None = None,
                labels: LongTensor | None = None, logits_to_keep: int = 0, **kwargs) -> CausalLMOutput:
        """Logits [B,T,vocab], or of the last `logits_to_keep` positions; `labels` as everywhere in transformers: the
        input itself, shifted here, -100 not scored. Padding, left or right, is a document of its own: it changes
        nothing in the row's real one.
        """
        logits = Prism.head(self, Prism.states(self, input_ids, attention_mask)[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.c.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: LongTensor, attention_mask: LongTensor | None = None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": 1}
