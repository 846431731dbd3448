def sample_tokens(*args, **kwargs):
    raise NotImplementedError


def start_token_of(*args):
    raise NotImplementedError
