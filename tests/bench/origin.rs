//! The far side of the loads: reads a true ClientHello, answers one byte as a server's first would
//! come, then does what a line of ten bytes says. No cryptography: no proxy here looks behind the hello.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use world::netns::Netns;

/// Send so many bytes, then close.
pub(crate) const DOWN: u8 = b'D';
/// Take so many bytes, then answer one and close.
pub(crate) const UP: u8 = b'U';
/// Keep the connection, and remember under this number when it ended.
pub(crate) const HOLD: u8 = b'H';

const PORT: u16 = 443;

/// When held connections last said something, and when they ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(Arc<Mutex<HashMap<u64, Stay>>>);

/// The life of one held connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stay {
    pub(crate) heard: Instant,
    pub(crate) ended: Option<Instant>,
}

impl Held {
    pub(crate) fn all(&self) -> HashMap<u64, Stay> {
        self.0.lock().expect("held").clone()
    }

    pub(crate) fn forget(&self) {
        self.0.lock().expect("held").clear();
    }

    fn heard(&self, number: u64) {
        let stay = Stay { heard: Instant::now(), ended: None };
        self.0.lock().expect("held").insert(number, stay);
    }

    fn ended(&self, number: u64) {
        if let Some(stay) = self.0.lock().expect("held").get_mut(&number) {
            stay.ended = Some(Instant::now());
        }
    }
}

/// Starts the far side on every address of the internet.
pub(crate) fn start(internet: &Netns) -> Held {
    let held = Held::default();
    let (memory, (listening, ready)) = (held.clone(), std::sync::mpsc::channel());
    internet.spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await.expect("listen");
            let _ = listening.send(());
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let memory = memory.clone();
                tokio::spawn(async move { serve(stream, memory).await });
            }
        });
    });
    ready.recv().expect("the far side listens");
    held
}

async fn serve(mut stream: TcpStream, held: Held) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut record = [0; 5];
    stream.read_exact(&mut record).await?;
    let [_, _, _, high, low] = record;
    let mut hello = vec![0; usize::from(u16::from_be_bytes([high, low]))];
    stream.read_exact(&mut hello).await?;
    stream.write_all(b"h").await?;
    let verb = stream.read_u8().await?;
    let number = stream.read_u64().await?;
    match verb {
        DOWN => send(&mut stream, number).await?,
        UP => {
            take(&mut stream, number).await?;
            stream.write_all(b"k").await?;
        }
        HOLD => {
            held.heard(number);
            let mut buffer = [0; 1024];
            while matches!(stream.read(&mut buffer).await, Ok(1..)) {
                held.heard(number);
            }
            held.ended(number);
        }
        _ => {}
    }
    stream.shutdown().await
}

async fn send(stream: &mut TcpStream, mut left: u64) -> io::Result<()> {
    let block = vec![0x17; 1 << 18];
    while left > 0 {
        let now = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        stream.write_all(block.get(..now).unwrap_or_default()).await?;
        left -= now as u64;
    }
    Ok(())
}

async fn take(stream: &mut TcpStream, mut left: u64) -> io::Result<()> {
    let mut block = vec![0; 1 << 18];
    while left > 0 {
        match stream.read(&mut block).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => left = left.saturating_sub(more as u64),
        }
    }
    Ok(())
}
