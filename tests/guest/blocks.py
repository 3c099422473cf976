# The guest's end of the streams of blocks: host, ports of raw, TLS, HTTP, and its own.
import asyncio, hashlib, http.client, json, os, ssl, sys, threading, traceback

SIZE = 16384
host, (raw, tls, clear, inward) = sys.argv[1], map(int, sys.argv[2:6])
seen, lock = {}, threading.Lock()


def block(stream, way, number):
    return hashlib.sha256(f'{stream}-{way}-{number}'.encode()).digest() * (SIZE // 32)


def tell():
    with lock:
        told = json.dumps({'pid': os.getpid(), **seen})
    with open('/run/blocks.new', 'w') as f:
        f.write(told)
    os.rename('/run/blocks.new', '/run/blocks')


def note(stream, **what):
    with lock:
        seen.setdefault(stream, {'blocks': 0}).update(what)


def check(stream, number, came):
    if came != block(stream, 'down', number):
        raise ValueError(f'block {number}')
    seen[stream]['blocks'] = number + 1


async def answer(stream, reader, writer):
    note(stream, port=writer.get_extra_info('sockname')[1])
    number = 0
    try:
        while True:
            check(stream, number, await reader.readexactly(SIZE))
            writer.write(block(stream, 'up', number))
            await writer.drain()
            number += 1
    except Exception as error:
        note(stream, wrong=repr(error))


def streamed():
    try:
        connection = http.client.HTTPConnection(host, clear)
        connection.request('GET', '/stream')
        note('http', port=connection.sock.getsockname()[1])
        response, number = connection.getresponse(), 0
        if response.status != 200:
            raise ValueError(f'{response.status} {response.read(500)}')
        while True:
            check('http', number, response.read(SIZE))
            number += 1
    except Exception as error:
        note('http', wrong=repr(error))


async def main():
    threading.Thread(target=streamed, daemon=True).start()
    async def served(reader, writer):
        # Others only knock.
        await answer('inward', reader, writer) if 'inward' not in seen else writer.close()
    server = await asyncio.start_server(served, '0.0.0.0', inward)
    trust = ssl.create_default_context(cafile='/etc/ssl/certs/world.pem')
    opened, tasks = [('raw', raw, None), ('tls', tls, trust)], []
    for stream, port, context in opened:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        # The loop itself does not keep them.
        tasks.append(asyncio.create_task(answer(stream, reader, writer)))
    while True:
        tell()
        await asyncio.sleep(0.5)


try:
    asyncio.run(main())
except Exception:
    note('program', wrong=traceback.format_exc())
    tell()
