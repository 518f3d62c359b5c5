"""Quest: the pages whose keys could have the highest scores."""
