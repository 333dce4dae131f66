"""Output heads are found in the models of transformers, in wrapped and adapted ones, and in others."""

from collections import OrderedDict

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig

from ds_layerwise.errors import RoutingError
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

# peft 0.21 asks transformers 5 for what that one has renamed.
pytestmark = [*rooms("routing_rules", "output_heads"),
              pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")]

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "vocab_size": 40, "num_labels": 3}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40, "num_labels": 3}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "num_labels": 3}
DISTILBERT = {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "vocab_size": 40, "num_labels": 3}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40, "num_labels": 3}
VISION = {"image_size": 8, "patch_size": 4, **SMALL}

#: Classes of transformers, their sizes, and the heads that each has. Tied ones are their embedding.
FAMILIES = [
    ("LlamaForCausalLM", "llama", SMALL, {"lm_head"}),
    ("LlamaForSequenceClassification", "llama", SMALL, {"score"}),
    ("LlamaForTokenClassification", "llama", SMALL, {"score"}),
    ("LlamaForQuestionAnswering", "llama", SMALL, {"qa_outputs"}),
    ("LlamaModel", "llama", SMALL, set()),
    ("MistralForSequenceClassification", "mistral", SMALL, {"score"}),
    ("Qwen2ForSequenceClassification", "qwen2", SMALL, {"score"}),
    ("Qwen3ForCausalLM", "qwen3", {**SMALL, "head_dim": 8, "tie_word_embeddings": False}, {"lm_head"}),
    ("Gemma2ForSequenceClassification", "gemma2", {**SMALL, "head_dim": 8}, {"score"}),
    ("PhiForCausalLM", "phi", SMALL, {"lm_head"}),
    ("MixtralForSequenceClassification", "mixtral", SMALL, {"score"}),
    ("GPT2ForSequenceClassification", "gpt2", GPT2, {"score"}),
    ("GPT2ForTokenClassification", "gpt2", GPT2, {"classifier"}),
    ("GPT2DoubleHeadsModel", "gpt2", GPT2, {"multiple_choice_head.summary"}),
    ("GPTNeoXForCausalLM", "gpt_neox", SMALL, {"lm_head"}),
    ("GPTNeoXForSequenceClassification", "gpt_neox", SMALL, {"score"}),
    ("OPTForSequenceClassification", "opt", {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16}, {"score"}),
    ("BertForSequenceClassification", "bert", SMALL, {"classifier"}),
    ("BertForTokenClassification", "bert", SMALL, {"classifier"}),
    ("BertForQuestionAnswering", "bert", SMALL, {"qa_outputs"}),
    ("BertForMultipleChoice", "bert", SMALL, {"classifier"}),
    ("BertForPreTraining", "bert", SMALL, {"cls.seq_relationship"}),
    ("BertForMaskedLM", "bert", {**SMALL, "tie_word_embeddings": False}, {"cls.predictions.decoder"}),
    ("RobertaForSequenceClassification", "roberta", SMALL, {"classifier.out_proj"}),
    ("RobertaForMaskedLM", "roberta", {**SMALL, "tie_word_embeddings": False}, {"lm_head.decoder"}),
    ("ElectraForSequenceClassification", "electra", {**SMALL, "embedding_size": 16}, {"classifier.out_proj"}),
    ("DebertaV2ForSequenceClassification", "deberta-v2", SMALL, {"classifier"}),
    ("ModernBertForSequenceClassification", "modernbert", {**SMALL, "pad_token_id": 0}, {"classifier"}),
    ("DistilBertForSequenceClassification", "distilbert", DISTILBERT, {"classifier"}),
    ("BartForSequenceClassification", "bart", BART, {"classification_head.out_proj"}),
    ("BartForConditionalGeneration", "bart", BART, set()),
    ("T5ForConditionalGeneration", "t5", T5, set()),
    ("T5ForSequenceClassification", "t5", T5, {"classification_head.out_proj"}),
    ("SwitchTransformersForConditionalGeneration", "switch_transformers",
     {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, set()),
    ("ViTForImageClassification", "vit", VISION, {"classifier"}),
    ("ResNetForImageClassification", "resnet",
     {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}, {"classifier.1"}),
]


def heads(model):
    """The modules whose weights are output heads."""
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    found = {name: route for name, route in routes.items() if "head" in route.reason.split(",")[0]}
    assert all(not route.whole for route in found.values())
    return {name.removesuffix(".weight") for name in found}


@pytest.mark.parametrize("cls, kind, sizes, expected", FAMILIES, ids=[family[0] for family in FAMILIES])
def test_families_of_transformers(cls, kind, sizes, expected):
    with torch.device("meta"):
        model = getattr(transformers, cls)(AutoConfig.for_model(kind, **sizes))
    assert heads(model) == expected


class ResNet(nn.Module):
    """A model that ends like those of torchvision."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)


class Vgg(nn.Module):
    """A model that ends like those of torchvision."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3))
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


class NanoGpt(nn.Module):
    """Names as in nanoGPT."""

    def __init__(self, tied, registered_first=False):
        super().__init__()
        if registered_first:
            self.lm_head = nn.Linear(8, 40, bias=False)
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(40, 8), "wpe": nn.Embedding(6, 8),
            "h": nn.ModuleList(nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
                               for _ in range(2)),
            "ln_f": nn.LayerNorm(8)})
        if not registered_first:
            self.lm_head = nn.Linear(8, 40, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight


class Critic(nn.Module):
    """A value head in front of what it reads, and attention whose modules are called like heads."""

    def __init__(self):
        super().__init__()
        self.v_head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.blocks = nn.ModuleList(nn.ModuleDict({"head": nn.Linear(8, 8), "router": nn.ModuleDict({
            "classifier": nn.Linear(8, 4)})}) for _ in range(2))
        self.norm = nn.LayerNorm(8)


class Regressor(nn.Module):
    """An MLP that normalises last, so that no layer is for certain its output."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)


class Loose(nn.Module):
    """Nobody can see whether the bare matrix comes before or after the last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.loose = nn.Parameter(torch.zeros(8, 8))


@pytest.mark.parametrize("model, expected", [
    (Loose(), set()),
    (nn.ModuleDict({"inner": Loose(), "out": nn.Linear(8, 3)}), {"out"}),
    (ResNet(), {"fc"}),
    (Vgg(), {"classifier.4"}),
    (NanoGpt(tied=False), {"lm_head"}),
    (NanoGpt(tied=True), set()),
    (nn.ModuleDict({"embed_out": nn.Linear(8, 3), "body": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}), {"embed_out"}),
    (NanoGpt(tied=False, registered_first=True), {"lm_head"}),
    (Critic(), {"v_head.2"}),
    (Regressor(), set()),
    (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), {"4"}),
    (nn.Sequential(nn.Linear(8, 16)), set()),
    (nn.ModuleDict({"inner": ResNet(), "scale": nn.Identity()}), {"inner.fc"}),
    (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), set()),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "")
def test_other_models(model, expected):
    assert heads(model) == expected


def test_a_head_stays_one_where_the_rest_is_frozen():
    model = ResNet()
    model.conv1.requires_grad_(False)
    assert heads(model) == {"fc"}
    model.layer1.requires_grad_(False)
    with pytest.raises(RoutingError, match=r"no parameter goes to the matrix.*1 x output head \(last linear layer\)"):
        heads(model)


def llama(cls, **sizes):
    torch.manual_seed(0)
    return getattr(transformers, cls)(AutoConfig.for_model("llama", **{**SMALL, **sizes}))


def test_lora_trains_a_head_beside_its_factors():
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    model = get_peft_model(llama("LlamaForSequenceClassification"), config)
    assert heads(model) == {"base_model.model.score.modules_to_save.default"}
    model.add_adapter("other", config)
    for param in model.parameters():
        param.requires_grad = True
    assert heads(model) == {f"base_model.model.score.{name}" for name in (
        "original_module", "modules_to_save.default", "modules_to_save.other")}


def test_factors_of_a_head_are_matrices():
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(llama("LlamaForCausalLM"), config)
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    assert len(routes) == 6 and all(route.whole for route in routes.values())
    factors = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    factors[1].lora_a, factors[1].lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
    assert heads(factors) == {"1"}


def test_a_wrapped_head_is_still_one():
    model = NanoGpt(tied=False, registered_first=True)
    # As torch.compile names it, where it compiles.
    model.lm_head = nn.ModuleDict({"_orig_mod": model.lm_head})
    assert heads(nn.ModuleDict({"_orig_mod": model})) == {"_orig_mod.lm_head._orig_mod"}


class Named(nn.Module):
    """Modules by name, in their order."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def body():
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Attention(nn.Module):
    """Attention like that of a diffusion model's block."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj_out = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)


#: Models that are easily taken for something else, and their heads.
EASILY_MISTAKEN = {
    # A head of the vocabulary beside what has a weaker name.
    "projector": (lambda: Named(image_projection=nn.Linear(8, 8), embed=nn.Embedding(40, 8), body=body(),
                                output=nn.Linear(8, 40)), {"image_projection", "output"}),
    "predictor": (lambda: Named(embed=nn.Embedding(40, 8), body=body(), predict_length=nn.Linear(8, 8),
                                out=nn.Linear(8, 40)), {"predict_length", "out"}),
    # Only what it holds is called after attention.
    "decoder": (lambda: Named(attention_decoder=Named(body=body(), output_projection=nn.Linear(8, 3))),
                {"attention_decoder.output_projection"}),
    "attention": (lambda: Named(body=body(), attention_block=Named(output_projection=nn.Linear(8, 3)),
                                norm=nn.LayerNorm(8)), set()),
    "embedding": (lambda: Named(embed=nn.Embedding(40, 8), body=body(), output_embedding=nn.Linear(8, 40)),
                  {"output_embedding"}),
    # A pooler, or a layer of the encoder, as wide as the model has positions, as in MobileBERT.
    "positions": (lambda: Named(embed=nn.Embedding(40, 8), positions=nn.Embedding(8, 8), body=body(),
                                pooler=Named(dense=nn.Linear(8, 8))), set()),
    "positions beside a head": (lambda: Named(classifier=nn.Linear(8, 3), positions=nn.Embedding(8, 8), body=body()),
                                {"classifier"}),
    "head in a sequence": (lambda: nn.Sequential(
        Named(body=nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))),
        nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), score=nn.Linear(8, 3), bbox_predictor=nn.Linear(8, 4)))),
        {"1.score", "1.bbox_predictor"}),
    "segments": (lambda: Named(body=nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)),
                               classifier=nn.Conv2d(64, 100, 1), norm=nn.BatchNorm2d(100)), {"classifier"}),
    "tasks": (lambda: Named(body=body(), heads=nn.ModuleList(
        Named(a=nn.Linear(8, 8), b=nn.Linear(8, 3)) for _ in range(2)),
                            norm=nn.LayerNorm(3)), {"heads.0.b", "heads.1.b"}),
    # Latent diffusion's first code: the block in the middle is one of those in the lists.
    "latents": (lambda: Named(input_blocks=nn.ModuleList([nn.Conv2d(4, 8, 3), Attention()]),
                              middle_block=nn.Sequential(nn.Conv2d(8, 8, 3), Attention()),
                              out=nn.Sequential(nn.GroupNorm(1, 8), nn.Conv2d(8, 4, 3))), {"out.1"}),
    # EDSR calls its first layer the head.
    "resolution": (lambda: Named(head=nn.Sequential(nn.Conv2d(3, 8, 3)), body=nn.Sequential(nn.Conv2d(8, 8, 3)),
                                 tail=nn.Sequential(nn.Conv2d(8, 3, 3))), {"tail.0"}),
    "one matrix": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)), set()),
    "blocks": (lambda: Named(blocks=nn.ModuleList(nn.Conv2d(8, 8, 3) for _ in range(3))), set()),
    "decoder first": (lambda: Named(decoder=nn.Sequential(nn.ConvTranspose2d(8, 4, 3), nn.Conv2d(4, 3, 3)),
                                    encoder=nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3))), set()),
    "one of attention's heads": (lambda: Named(sa_head=Named(key=nn.Linear(8, 8), query=nn.Linear(8, 8),
                                                             value=nn.Linear(8, 8)), ffn=nn.Linear(8, 8),
                                               norm=nn.LayerNorm(8)), set()),
    "a loss of torch": (lambda: Named(body=body(), loss=nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 20], div_value=2)),
                        {"loss.head", "loss.tail.0.0", "loss.tail.0.1", "loss.tail.1.0", "loss.tail.1.1"}),
}


@pytest.mark.parametrize("kind", EASILY_MISTAKEN)
def test_models_that_are_easily_mistaken(kind):
    make, expected = EASILY_MISTAKEN[kind]
    assert heads(make()) == expected


@pytest.mark.parametrize("last, is_head", [
    (nn.Conv2d(8, 3, 3), True), (nn.ConvTranspose2d(8, 3, 3), True), (nn.Conv2d(8, 4, 3), False),
    # Something with parameters follows.
    (nn.Sequential(nn.Conv2d(8, 3, 3), nn.GroupNorm(1, 3)), False)])
def test_the_last_convolution_of_a_model_of_images(last, is_head):
    for kind in (nn.Sequential, lambda *layers: nn.ModuleList(layers)):
        check_last_kernel(kind(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), last), is_head)


def check_last_kernel(model, is_head):
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    kernels = [route for name, route in routes.items() if name.startswith("2.") and len(
        model.get_parameter(name).shape) == 4]
    assert [(route.whole, route.reason) for route in kernels] == [
        (False, "output head (last convolution)") if is_head else (True, "convolution")]


def test_a_single_convolution_is_no_head():
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    assert route_parameters(model, [{"params": list(model.parameters())}])["0.weight"].whole
