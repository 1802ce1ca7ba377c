"""LongBench's data sets: prompt, longest answer and metric of each, as the benchmark has them.

Prompts are from THUDM/LongBench (MIT licence), config/dataset2prompt.json.
"""

from dataclasses import dataclass

from vllm_kvx.tools.tasks import longbench_metrics as metrics
from vllm_kvx.tools.tasks.longbench_metrics import Metric


@dataclass(frozen=True)
class Format:
    """How a data set asks and scores.

    prompt: with places for the sample's `context` and `input`.
    chat: whether the benchmark applies a chat template. first_line: whether it scores the answer's
    first line alone.
    """

    prompt: str
    max_tokens: int
    metric: Metric
    chat: bool = True
    first_line: bool = False


_SHORT_ANSWER = "Only give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. {_SHORT_ANSWER}\n\nThe following are given "
    "passages.\n{context}\n\nAnswer the question based on the given passages. "
    f"{_SHORT_ANSWER}\n\nQuestion: {{input}}\nAnswer:"
)
_STORY_ANSWER = (
    "as concisely as you can, using a single phrase if possible. Do not provide any explanation."
)
_ARTICLE_ANSWER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation."
)

FORMATS: dict[str, Format] = {
    "narrativeqa": Format(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_STORY_ANSWER}\n\nStory: {{context}}\n\nNow, answer the question "
        f"based on the story {_STORY_ANSWER}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        metrics.f1,
    ),
    "qasper": Format(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE_ANSWER}"
        "\n\nArticle: {context}\n\n Answer the question based on the above article "
        f"{_ARTICLE_ANSWER}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        metrics.f1,
    ),
    "multifieldqa_en": Format(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        metrics.f1,
    ),
    "multifieldqa_zh": Format(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，"
        "只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        metrics.f1_zh,
    ),
    "hotpotqa": Format(_PASSAGES, 32, metrics.f1),
    "2wikimqa": Format(_PASSAGES, 32, metrics.f1),
    "musique": Format(_PASSAGES, 32, metrics.f1),
    "dureader": Format(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        128,
        metrics.rouge_l_zh,
    ),
    "gov_report": Format(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "qmsum": Format(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}"
        "\nAnswer:",
        512,
        metrics.rouge_l,
    ),
    "multi_news": Format(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "vcsum": Format(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n"
        "会议总结：",
        512,
        metrics.rouge_l_zh,
    ),
    "trec": Format(
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}",
        64,
        metrics.classification,
        chat=False,
        first_line=True,
    ),
    "triviaqa": Format(
        f"Answer the question based on the given passage. {_SHORT_ANSWER} The following are some "
        "examples.\n\n{context}\n\n{input}",
        32,
        metrics.f1,
        chat=False,
        first_line=True,
    ),
    "samsum": Format(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        metrics.rouge_l,
        chat=False,
        first_line=True,
    ),
    "lsht": Format(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        metrics.classification,
        chat=False,
        first_line=True,
    ),
    "passage_count": Format(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        32,
        metrics.count,
    ),
    "passage_retrieval_en": Format(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        metrics.retrieval,
    ),
    "passage_retrieval_zh": Format(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"
        '"段落1"，"段落2"等格式\n\n答案是：',
        32,
        metrics.retrieval,
    ),
    "lcc": Format(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
        metrics.code_similarity,
        chat=False,
    ),
    "repobench-p": Format(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        metrics.code_similarity,
        chat=False,
    ),
}
