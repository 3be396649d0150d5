"""Graders of other projects' data and answers: tests of MBPP, HumanEval, APPS and LiveCodeBench
(``code``), IFEval's instructions, math-verify's expressions, judges behind OpenAI's API (``judge``,
``judge_ranking``, ``rubric``), and a reward model of Hugging Face.
"""
