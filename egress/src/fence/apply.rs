//! The fence in the kernel: changes in atomic batches, then read back and compared.
//!
//! These block for about a millisecond and act on the calling thread's namespace; only `fence`
//! calls them, on the thread that lives in the guests' world.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use policy::Slot;

use crate::error::Error;
use crate::fence::batch::{
    Batch, Kind, bounds, get_chain, get_chains, get_elements, get_generation, get_rules, get_table,
    get_tables,
};
use crate::fence::decode::{
    Held, HeldChain, Message, counted, elements, generation as number, table_flags, table_name,
    table_uses,
};
use crate::fence::encode::{expressions, userdata};
use crate::fence::layout::{chain_names, is_ours, slot_of_chain, table_of};
use crate::fence::netlink::with_netfilter;
use crate::fence::reason::Reason;
use crate::fence::rule::{Chain, Family, Set, Table, TableId};

/// How often a dump is repeated when the rules change while it is being read.
const DUMPS: usize = 16;

thread_local! {
    /// How far changes of ours moved the generation of the rules of this thread's namespace.
    static OURS: Cell<u32> = const { Cell::new(0) };
}

pub(crate) fn install_base(meant: &Table) -> Result<(), Error> {
    let mut batch = Batch::default();
    if flags(&meant.id)?.is_some() {
        batch.delete_table(&meant.id);
    }
    batch.add_table(&meant.id);
    meant.chains.iter().for_each(|chain| batch.add_chain(&meant.id, chain));
    commit(batch)?;
    verify(meant)
}

pub(crate) fn attach(slot: Slot, meant: &Table) -> Result<(), Error> {
    wake(&meant.id)?;
    let mut batch = Batch::default();
    for set in &meant.sets {
        match verify_set(&meant.id, set) {
            Err(Error::Differs { .. }) => {
                batch.add_table(&meant.id);
                batch.add_set(&meant.id, set);
            }
            checked => checked?,
        }
    }
    remove_old(slot, &mut batch)?;
    meant.chains.iter().for_each(|chain| batch.add_chain(&meant.id, chain));
    commit(batch)?;
    verify(meant)
}

/// Puts other rules into one chain that exists; `meant` is all of its slot.
pub(crate) fn refill(meant: &Table, chain: &Chain) -> Result<(), Error> {
    let mut batch = Batch::default();
    batch.refill_chain(&meant.id, chain);
    commit(batch)?;
    verify(meant)
}

pub(crate) fn verify(meant: &Table) -> Result<(), Error> {
    compare(&format!("the flags of the table {}", meant.id), &Some(0), &flags(&meant.id)?)?;
    meant.sets.iter().try_for_each(|set| verify_set(&meant.id, set))?;
    meant.chains.iter().try_for_each(|chain| verify_chain(&meant.id, chain))
}

pub(crate) fn detach(slot: Slot) -> Result<(), Error> {
    let mut batch = Batch::default();
    let removed = remove_old(slot, &mut batch)?;
    // With its last chain goes the table, of which nothing is left then but the set that they shared.
    let table = table_of(slot);
    if ask_table(&table, table_uses)? == Some(removed + 1) {
        batch.delete_table(&table);
    }
    commit(batch)
}

pub(crate) fn moved_by_others() -> Result<Option<u32>, Error> {
    Ok(generation()?.map(|now| now.wrapping_sub(OURS.get())))
}

/// A number that every change of rules in the namespace moves by one, whoever makes it.
fn generation() -> Result<Option<u32>, Error> {
    let mut found = None;
    with_netfilter(|kernel| {
        kernel.ask(&get_generation(), "ask for the generation of the rules", |answer| {
            if answer.kind == Kind::NewGeneration.number() {
                found = number(answer.body);
            }
        })
    })?;
    Ok(found)
}

pub(crate) fn present() -> Result<Vec<Slot>, Error> {
    let chains = ask(&get_chains(Family::Netdev), "list the chains", HeldChain::of_message)?;
    let ours = chains.iter().filter_map(|chain| {
        slot_of_chain(&chain.name).filter(|slot| table_of(*slot).name == chain.table)
    });
    let slots: BTreeSet<Slot> = ours.collect();
    Ok(slots.into_iter().collect())
}

pub(crate) fn counters(slot: Slot) -> Result<Vec<(Reason, u64, u64)>, Error> {
    let mut sums: BTreeMap<Reason, (u64, u64)> = BTreeMap::new();
    for chain in chain_names(slot) {
        let what = format!("read the counters of the chain {chain}");
        for (tag, packets, bytes) in ask(&get_rules(&table_of(slot), &chain), &what, counted)? {
            if let Some((_, reason)) = Reason::of_tag(&tag).filter(|(of, _)| *of == slot) {
                let sum = sums.entry(reason).or_default();
                *sum = (sum.0.saturating_add(packets), sum.1.saturating_add(bytes));
            }
        }
    }
    Ok(sums.into_iter().map(|(reason, (packets, bytes))| (reason, packets, bytes)).collect())
}

pub(crate) fn flush() -> Result<(), Error> {
    let mut batch = Batch::default();
    for family in [Family::Netdev, Family::Inet] {
        let names = ask(&get_tables(family), "list the tables", table_name)?;
        for name in names.into_iter().filter(|name| is_ours(name)) {
            batch.delete_table(&TableId { family, name });
        }
    }
    commit(batch)
}

/// Does all of a batch, or nothing, and counts it as ours where it moved the rules, and nobody else did
/// meanwhile. What is not counted is taken for a change of others, and looked at.
fn commit(batch: Batch) -> Result<(), Error> {
    if batch.is_empty() {
        return Ok(());
    }
    let before = generation()?;
    with_netfilter(|kernel| kernel.commit(batch))?;
    let after = generation().ok().flatten();
    if after.is_some() && after == before.map(|before| before.wrapping_add(1)) {
        OURS.set(OURS.get().wrapping_add(1));
    }
    Ok(())
}

/// Lets a table filter that somebody made dormant: its chains list as ever, and see no packet. By
/// itself, since kernels refuse to change a table's flags and its base chains in one batch.
fn wake(table: &TableId) -> Result<(), Error> {
    let mut batch = Batch::default();
    if flags(table)?.is_some_and(|flags| flags != 0) {
        batch.add_table(table);
    }
    commit(batch)
}

/// The flags of a table (`NFTA_TABLE_FLAGS`), of which ours has none; None where it is not there.
fn flags(table: &TableId) -> Result<Option<u32>, Error> {
    ask_table(table, table_flags)
}

fn ask_table(table: &TableId, take: impl Fn(&[u8]) -> Option<u32>) -> Result<Option<u32>, Error> {
    let what = format!("read the table {table}");
    Ok(ask(&get_table(table), &what, take)?.pop())
}

/// Removes what chains a slot has, and says how many; the one with the jump goes before the one that is
/// jumped to.
fn remove_old(slot: Slot, batch: &mut Batch) -> Result<u32, Error> {
    let table = table_of(slot);
    let mut removed = 0;
    for name in chain_names(slot) {
        if find_chain(&table, &name)?.is_some() {
            batch.delete_chain(&table, &name);
            removed += 1;
        }
    }
    Ok(removed)
}

fn find_chain(table: &TableId, name: &str) -> Result<Option<HeldChain>, Error> {
    let what = format!("read the chain {name}");
    Ok(ask(&get_chain(table, name), &what, HeldChain::of_message)?.pop())
}

/// Asks until the answer is of one moment.
fn ask<T>(question: &[u8], what: &str, take: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>, Error> {
    let answers =
        [Kind::NewTable, Kind::NewChain, Kind::NewRule, Kind::NewElements].map(Kind::number);
    for _ in 0..DUMPS {
        let mut taken = Vec::new();
        let keep = |message: Message<'_>| {
            if answers.contains(&message.kind) {
                taken.extend(take(message.body));
            }
        };
        let steady = with_netfilter(|kernel| kernel.ask(question, what, keep))?;
        if steady {
            return Ok(taken);
        }
    }
    Err(Error::Differs {
        at: what.to_owned(),
        meant: "rules at rest".to_owned(),
        found: "rules that change all the time".to_owned(),
    })
}

fn verify_set(table: &TableId, set: &Set) -> Result<(), Error> {
    let what = format!("read the set {}", set.name);
    let parts = ask(&get_elements(table, set.name), &what, |body| Some(elements(body)))?;
    let mut found: Vec<_> = parts.into_iter().flatten().collect();
    found.sort_unstable();
    let meant: Vec<_> = bounds(set).iter().map(|(at, end)| (at.octets(), *end)).collect();
    compare(&format!("set {}", set.name), &meant, &found)
}

fn verify_chain(table: &TableId, chain: &Chain) -> Result<(), Error> {
    let name = &chain.name;
    let meant = HeldChain {
        table: table.name.clone(),
        name: name.clone(),
        hook: chain.hook.as_ref().map(|hook| {
            let device = hook.device.clone().unwrap_or_default();
            (hook.point.number(), hook.priority.cast_unsigned(), device, 0)
        }),
    };
    compare(&format!("chain {name}"), &Some(meant), &find_chain(table, name)?)?;
    let what = format!("read the rules of the chain {name}");
    let found = ask(&get_rules(table, name), &what, |body| Some(Held::of_message(body)))?;
    let mut found = found.iter();
    for (n, rule) in chain.rules.iter().enumerate() {
        let comment = rule.comment.as_deref().map(userdata).unwrap_or_default();
        let held = found.next();
        if held != Some(&Held::new(&expressions(rule), &comment)) {
            return Err(Error::Differs {
                at: format!("rule {n} of chain {name}"),
                meant: rule.to_string(),
                found: held.map_or_else(|| "nothing".to_owned(), Held::to_string),
            });
        }
    }
    found.next().map_or(Ok(()), |extra| {
        Err(Error::Differs {
            at: format!("the end of chain {name}"),
            meant: "nothing".to_owned(),
            found: extra.to_string(),
        })
    })
}

fn compare<T: PartialEq + std::fmt::Debug>(at: &str, meant: &T, found: &T) -> Result<(), Error> {
    if meant == found {
        return Ok(());
    }
    let (meant, found) = (format!("{meant:?}"), format!("{found:?}"));
    Err(Error::Differs { at: at.to_owned(), meant, found })
}
